//! Label and field selectors, in the syntax of query strings.
//!
//! Labels: `a=b`, `a==b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`, `a>1`, `a<2`, joined by commas.
//! Fields: `path=value` and `path!=value` over the few paths that a real server indexes for the kind; any other path is a
//! 400, since a client that relies on it would fail elsewhere.

use serde_json::Value;

use super::kind::Kind;
use super::meta;
use super::status::ApiError;

#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<FieldTerm>,
}

#[derive(Clone, Debug, PartialEq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
    Above(i64),
    Below(i64),
}

#[derive(Clone, Debug, PartialEq)]
struct FieldTerm {
    path: String,
    value: String,
    is_equal: bool,
}

impl Selector {
    pub(super) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, ApiError> {
        let labels = split_outside_parens(labels).into_iter().map(requirement).collect::<Result<_, _>>()?;
        let fields = fields.split(',').filter(|term| !term.trim().is_empty());
        let fields = fields.map(|term| field_term(kind, term)).collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Does a stored object match?
    pub(super) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        let label = |key: &str| labels.and_then(|all| all.get(key)).and_then(Value::as_str);
        self.labels.iter().all(|requirement| requirement.test.holds(label(&requirement.key)))
            && self.fields.iter().all(|term| (field(object, &term.path) == term.value) == term.is_equal)
    }
}

impl Test {
    fn holds(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|text| text.parse::<i64>().ok());
        match self {
            Self::In(values) => value.is_some_and(|value| values.iter().any(|one| one == value)),
            Self::NotIn(values) => value.is_none_or(|value| values.iter().all(|one| one != value)),
            Self::Exists => value.is_some(),
            Self::Absent => value.is_none(),
            Self::Above(bound) => number().is_some_and(|number| number > *bound),
            Self::Below(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

fn split_outside_parens(text: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let parts = text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn unreadable(term: &str) -> ApiError {
    ApiError::bad_request(format!("unable to parse requirement: {term:?}"))
}

fn requirement(term: &str) -> Result<Requirement, ApiError> {
    let (key, test) = if let Some(open) = term.find('(') {
        set_based(term, open)?
    } else if let Some(key) = term.strip_prefix('!') {
        (key, Test::Absent)
    } else if let Some((key, value)) = term.split_once("!=") {
        (key, Test::NotIn(vec![value.trim().to_owned()]))
    } else if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        (key, Test::In(vec![value.trim().to_owned()]))
    } else if let Some((key, bound)) = term.split_once('>') {
        (key, Test::Above(bound.trim().parse().map_err(|_| unreadable(term))?))
    } else if let Some((key, bound)) = term.split_once('<') {
        (key, Test::Below(bound.trim().parse().map_err(|_| unreadable(term))?))
    } else {
        (term, Test::Exists)
    };
    let key = key.trim();
    if key.is_empty() || key.contains(char::is_whitespace) {
        return Err(unreadable(term));
    }
    Ok(Requirement { key: key.to_owned(), test })
}

/// `key in (a, b)` and `key notin (a, b)`.
fn set_based(term: &str, open: usize) -> Result<(&str, Test), ApiError> {
    let inside = term[open + 1..].strip_suffix(')').ok_or_else(|| unreadable(term))?;
    let values = inside.split(',').map(|value| value.trim().to_owned()).collect();
    match term[..open].trim().rsplit_once(char::is_whitespace) {
        Some((key, "in")) => Ok((key, Test::In(values))),
        Some((key, "notin")) => Ok((key, Test::NotIn(values))),
        _ => Err(unreadable(term)),
    }
}

fn field_term(kind: &Kind, term: &str) -> Result<FieldTerm, ApiError> {
    let (path, value, is_equal) = if let Some((path, value)) = term.split_once("!=") {
        (path, value, false)
    } else if let Some((path, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        (path, value, true)
    } else {
        return Err(ApiError::bad_request(format!("invalid selector: {term:?}; can't understand {term:?}")));
    };
    let path = path.trim();
    if !is_indexed(kind, path) {
        return Err(ApiError::bad_request(format!("field label not supported: {path}")));
    }
    Ok(FieldTerm { path: path.to_owned(), value: value.trim().to_owned(), is_equal })
}

fn is_indexed(kind: &Kind, path: &str) -> bool {
    match path {
        "metadata.name" => true,
        "metadata.namespace" => kind.namespaced,
        "spec.nodeName"
        | "spec.restartPolicy"
        | "spec.schedulerName"
        | "spec.serviceAccountName"
        | "spec.hostNetwork"
        | "status.podIP"
        | "status.podIPs"
        | "status.nominatedNodeName" => &*kind.storage == "pods",
        "status.phase" => matches!(&*kind.storage, "pods" | "namespaces"),
        "spec.unschedulable" => &*kind.storage == "nodes",
        "reason" | "type" | "source" | "reportingComponent" => &*kind.storage == "events",
        _ => &*kind.storage == "events" && (path.starts_with("involvedObject.") || path.starts_with("regarding.")),
    }
}

/// The text of a field of a stored object; absent reads as empty, as in a real server's index.
fn field(object: &Value, path: &str) -> String {
    let pointer = match path {
        "source" if !meta::text(object, "/source/component").is_empty() => "/source/component".to_owned(),
        "source" => "/reportingComponent".to_owned(),
        _ => format!("/{}", path.replacen("regarding.", "involvedObject.", 1).replace('.', "/")),
    };
    match object.pointer(&pointer) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None if matches!(path, "spec.unschedulable" | "spec.hostNetwork") => "false".to_owned(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::apiserver::kind;

    fn selects(labels: &str, fields: &str) -> bool {
        let pods = kind::builtin("", "pods").expect("pods are built in");
        let pod = json!({
            "metadata": {"name": "web", "namespace": "prod", "labels": {"app": "web", "n": "5", "empty": ""}},
            "spec": {"nodeName": "node1"}, "status": {"phase": "Running"},
        });
        Selector::parse(&pods, labels, fields).expect("a readable selector").matches(&pod)
    }

    #[test]
    fn every_label_operator() {
        for yes in [
            "",
            "app",
            "app=web",
            "app==web",
            "app!=db",
            "missing!=x",
            "!missing",
            "app in (db, web)",
            "app in (web),n",
            "app notin (db)",
            "missing notin (a)",
            "n>4",
            "n<6",
            "empty=",
            "empty in ()",
            "app in (web,db), !missing",
        ] {
            assert!(selects(yes, ""), "{yes:?} selects");
        }
        for no in ["missing", "app=db", "app!=web", "!app", "app in (db)", "app notin (web,db)", "n>5", "n<5", "app>1"]
        {
            assert!(!selects(no, ""), "{no:?} does not select");
        }
    }

    #[test]
    fn fields_that_are_indexed() {
        assert!(selects("", "spec.nodeName=node1,status.phase!=Failed,metadata.namespace=prod"));
        assert!(!selects("", "spec.nodeName=node2"));
        assert!(selects("", "status.podIP="));
    }

    #[test]
    fn unreadable_selectors_are_refused() {
        let pods = kind::builtin("", "pods").expect("pods are built in");
        for (labels, fields) in
            [("a in b", ""), ("a in (b", ""), ("=b", ""), ("a>b", ""), ("", "spec.foo=1"), ("", "x")]
        {
            let refusal = Selector::parse(&pods, labels, fields).expect_err("not readable");
            assert_eq!(refusal.code(), 400, "{labels:?} {fields:?}");
        }
    }
}
