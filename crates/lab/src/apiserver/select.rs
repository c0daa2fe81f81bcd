//! Label and field selectors, in the syntax of query strings.
//!
//! Labels: `a=b`, `a==b`, `a!=b`, `a`, `!a`, joined by commas.
//! Fields: `path=value` and `path!=value` over the few paths that a real server indexes for the kind; any other path is a
//! 400, since a client that relies on it would fail elsewhere.

use serde_json::Value;

use super::kind::Kind;
use super::meta;
use super::status::ApiError;

#[derive(Clone, Debug, Default)]
pub(super) struct ListSelector {
    labels: Vec<LabelRequirement>,
    fields: Vec<FieldTerm>,
}

/// A label has this value (any, where there is none), or has not.
#[derive(Clone, Debug)]
struct LabelRequirement {
    key: String,
    value: Option<String>,
    holds: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct FieldTerm {
    path: String,
    value: String,
    is_equal: bool,
}

impl ListSelector {
    pub(super) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, ApiError> {
        fn terms(text: &str) -> impl Iterator<Item = &str> {
            text.split(',').map(str::trim).filter(|term| !term.is_empty())
        }
        let labels = terms(labels).map(requirement).collect::<Result<_, _>>()?;
        let fields = terms(fields).map(|term| field_term(kind, term)).collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Does a stored object match?
    pub(super) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        let label = |key: &str| labels.and_then(|all| all.get(key)).and_then(Value::as_str);
        self.labels.iter().all(|one| {
            let is_so = label(&one.key).is_some_and(|label| one.value.as_ref().is_none_or(|value| label == value));
            is_so == one.holds
        }) && self.fields.iter().all(|term| (field(object, &term.path) == term.value) == term.is_equal)
    }
}

fn requirement(term: &str) -> Result<LabelRequirement, ApiError> {
    let (key, value, holds) = match split(term) {
        Some((key, value, holds)) => (key, Some(value.to_owned()), holds),
        None => (term.trim_start_matches('!'), None, !term.starts_with('!')),
    };
    if key.is_empty() || key.contains(|c: char| !c.is_ascii_alphanumeric() && !"-_./".contains(c)) {
        return Err(ApiError::bad_request(format!("unable to parse requirement: {term:?}")));
    }
    Ok(LabelRequirement { key: key.to_owned(), value, holds })
}

/// `key=value`, `key==value` or `key!=value`: key, value and whether they shall be equal.
fn split(term: &str) -> Option<(&str, &str, bool)> {
    let (key, value) = term.split_once('=')?;
    let (plain, holds) = key.strip_suffix('!').map_or((key, true), |key| (key, false));
    Some((plain.trim(), value.trim_start_matches('=').trim(), holds))
}

fn field_term(kind: &Kind, term: &str) -> Result<FieldTerm, ApiError> {
    let Some((path, value, is_equal)) = split(term) else {
        return Err(ApiError::bad_request(format!("invalid selector: {term:?}; can't understand {term:?}")));
    };
    if !is_indexed(kind, path) {
        return Err(ApiError::bad_request(format!("field label not supported: {path}")));
    }
    Ok(FieldTerm { path: path.to_owned(), value: value.to_owned(), is_equal })
}

fn is_indexed(kind: &Kind, path: &str) -> bool {
    match path {
        "metadata.name" => true,
        "metadata.namespace" => kind.namespaced,
        "spec.nodeName" => &*kind.storage == "pods",
        "status.phase" => matches!(&*kind.storage, "pods" | "namespaces"),
        "reason" | "type" => &*kind.storage == "events",
        _ => &*kind.storage == "events" && (path.starts_with("involvedObject.") || path.starts_with("regarding.")),
    }
}

/// The text of a field of a stored object; absent reads as empty, as in a real server's index.
fn field<'a>(object: &'a Value, path: &str) -> &'a str {
    meta::text(object, &format!("/{}", path.replacen("regarding.", "involvedObject.", 1).replace('.', "/")))
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
        ListSelector::parse(&pods, labels, fields).expect("a readable selector").matches(&pod)
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
            "app=web,n",
            "empty=",
            "app , !missing",
        ] {
            assert!(selects(yes, ""), "{yes:?} selects");
        }
        for no in ["missing", "app=db", "app!=web", "!app", "app=web,missing"] {
            assert!(!selects(no, ""), "{no:?} does not select");
        }
    }

    #[test]
    fn fields_that_are_indexed() {
        assert!(selects("", "spec.nodeName=node1,status.phase!=Failed,metadata.namespace=prod"));
        assert!(!selects("", "spec.nodeName=node2"));
    }

    #[test]
    fn unreadable_selectors_are_refused() {
        let pods = kind::builtin("", "pods").expect("pods are built in");
        for (labels, fields) in [("a in (b)", ""), ("=b", ""), ("a>b", ""), ("", "spec.foo=1"), ("", "x")] {
            let refusal = ListSelector::parse(&pods, labels, fields).expect_err("not readable");
            assert_eq!(refusal.code(), 400, "{labels:?} {fields:?}");
        }
    }
}
