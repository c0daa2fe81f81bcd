//! The reference of `docs/api.md`: every field of the kinds that are served, those of other projects as they are defined here, from
//! the schemas of their definitions.

use egress_kube::{antrea, cilium, crd, egress_router};
use serde_json::Value;

pub(super) fn reference() -> Result<String, serde_yaml::Error> {
    let definitions = [
        crd::manifest()?,
        crd::service_manifest()?,
        crd::assignment_manifest()?,
        crd::node_manifest()?,
        antrea::crd::egress_manifest()?,
        antrea::crd::pool_manifest()?,
        cilium::crd::policy_manifest()?,
        cilium::crd::status_manifest()?,
        egress_router::manifest()?,
    ];
    let sections = definitions.iter().map(|text| Ok(section(&serde_yaml::from_str(text)?)));
    Ok(sections.collect::<Result<Vec<_>, serde_yaml::Error>>()?.join("\n"))
}

fn section(definition: &Value) -> String {
    let spec = &definition["spec"];
    let names = &spec["names"];
    let mut section = format!("## {}\n\n", text(&names["kind"]));
    for (number, version) in list(&spec["versions"]).iter().enumerate() {
        if number > 0 {
            section += "\n";
        }
        let schema = &version["schema"]["openAPIV3Schema"];
        let short = list(&names["shortNames"]).iter().map(|name| format!(", `{}`", text(name))).collect::<String>();
        section += &format!(
            "`{}/{}`{}, {}; `kubectl get {}`{short}. {}\n\n| field | type | meaning |\n|---|---|---|\n",
            text(&spec["group"]),
            text(&version["name"]),
            if version["deprecated"] == true { " (deprecated)" } else { "" },
            text(&spec["scope"]).to_lowercase(),
            text(&names["plural"]),
            cell(text(&schema["description"])),
        );
        for part in ["spec", "status"] {
            fields(part, &schema["properties"][part], &mut section);
        }
    }
    section
}

/// A row for each field below `path`.
fn fields(path: &str, schema: &Value, table: &mut String) {
    let (path, schema) = match schema["items"].as_object() {
        Some(_) => (format!("{path}[]"), &schema["items"]),
        None => (path.to_owned(), schema),
    };
    let required = list(&schema["required"]);
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let need = if required.iter().any(|one| one == name) { ", required" } else { "" };
        let meaning = cell(text(&field["description"]));
        *table += &format!("| `{path}` | {}{need} | {meaning} |\n", kind(field));
        fields(&path, field, table);
    }
}

/// The type with its bounds.
fn kind(schema: &Value) -> String {
    let mut kind = match text(&schema["type"]) {
        "array" => format!("list of {}", kind(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map to {}", kind(&schema["additionalProperties"]))
        }
        "" => "any".to_owned(),
        other => other.to_owned(),
    };
    if let Some(format) = schema["format"].as_str() {
        kind += &format!(" ({format})");
    }
    let values: Vec<String> = list(&schema["enum"]).iter().map(|value| format!("`{}`", text(value))).collect();
    if !values.is_empty() {
        kind += &format!(": {}", values.join(", "));
    }
    for (bound, words) in [
        ("minimum", "at least #"),
        ("maximum", "at most #"),
        ("minItems", "at least # entries"),
        ("maxItems", "at most # entries"),
        ("minLength", "at least # characters"),
        ("maxLength", "at most # characters"),
        ("default", "default #"),
    ] {
        // Bounds of numbers are floating-point in a definition.
        let value = match &schema[bound] {
            Value::Null => continue,
            Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), |float| float.to_string()),
            other => other.to_string(),
        };
        kind += &format!(", {}", words.replace('#', &value));
    }
    kind
}

/// Text in a cell of a table: one line.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "&lt;")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_kind_has_a_section_and_each_row_three_cells() {
        let reference = reference().expect("YAML");
        for kind in [
            "EgressIP",
            "EgressService",
            "EgressAssignment",
            "EgressNode",
            "Egress",
            "ExternalIPPool",
            "CiliumEgressGatewayPolicy",
            "EgressGatewayPolicyStatus",
            "EgressRouter",
        ] {
            assert!(reference.contains(&format!("## {kind}\n")), "{kind}");
        }
        assert!(reference.contains("| `status.interfaces[].networks[].network` | string, required | "));
        for row in reference.lines().filter(|line| line.starts_with('|')) {
            assert_eq!(row.replace("\\|", "").matches('|').count(), 4, "{row}");
        }
    }

    #[test]
    fn types_have_their_bounds() {
        let schema = json!({"type": "array", "maxItems": 4, "items": {"type": "string", "enum": ["a", "b"]}});
        assert_eq!(kind(&schema), "list of string: `a`, `b`, at most 4 entries");
        let schema =
            json!({"type": "object", "additionalProperties": {"type": "integer", "format": "int64", "minimum": 1.0}});
        assert_eq!(kind(&schema), "map to integer (int64), at least 1");
        assert_eq!(cell("a |\n b <c>"), "a \\| b &lt;c>");
    }
}
