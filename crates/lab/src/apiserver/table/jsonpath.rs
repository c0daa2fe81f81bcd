//! The JSONPath of printer columns: `.field`, `[0]`, `[*]` and `[?(@.field=="value")]`.

use regex::Regex;
use serde_json::Value;

#[derive(Clone, Debug)]
enum PathStep {
    Field(String),
    Item(usize),
    Every,
    Where { field: String, value: String },
}

/// A parsed path; a step that cannot be read is left out.
#[derive(Clone, Debug)]
pub(super) struct JsonPath(Vec<PathStep>);

impl JsonPath {
    pub(super) fn parse(text: &str) -> Self {
        let step = Regex::new(r#"\.(\w+)|\[(\*|\d+)\]|\[\?\(@\.(\w+)=="([^"]*)"\)\]"#).expect("a valid expression");
        let steps = step.captures_iter(text).map(|found| match (found.get(1), found.get(2)) {
            (Some(field), _) => PathStep::Field(field.as_str().to_owned()),
            (None, Some(which)) => which.as_str().parse().map_or(PathStep::Every, PathStep::Item),
            (None, None) => PathStep::Where { field: found[3].to_owned(), value: found[4].to_owned() },
        });
        Self(steps.collect())
    }

    pub(super) fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        let found =
            self.0.iter().fold(vec![root], |found, step| found.into_iter().flat_map(|one| step.of(one)).collect());
        found.first().copied()
    }
}

impl PathStep {
    fn of<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let items = value.as_array().into_iter().flatten();
        match self {
            Self::Field(name) => value.get(name).into_iter().collect(),
            Self::Item(place) => items.skip(*place).take(1).collect(),
            Self::Every => items.collect(),
            Self::Where { field, value } => items.filter(|item| item[field] == **value).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_of_printer_columns() {
        let object = json!({
            "spec": {"list": ["one", "two"]},
            "status": {"conditions": [{"type": "A", "status": "1"}, {"type": "Ready", "status": "True"}]},
        });
        for (path, first) in [
            (".spec.list[*]", Some(json!("one"))),
            (".spec.list", Some(json!(["one", "two"]))),
            (r#".status.conditions[?(@.type=="Ready")].status"#, Some(json!("True"))),
            (".status.conditions[*].type", Some(json!("A"))),
            (".status.conditions[1].type", Some(json!("Ready"))),
            (".status.conditions[2].type", None),
            (".spec.gone[*].x", None),
        ] {
            assert_eq!(JsonPath::parse(path).first(&object), first.as_ref(), "{path}");
        }
    }
}
