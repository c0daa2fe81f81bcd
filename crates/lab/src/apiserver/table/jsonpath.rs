//! The JSONPath of printer columns: `.field`, `['field']`, `[0]`, `[*]`, `.*` and `[?(@.field=="value")]`.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    Every,
    Where { path: Vec<String>, value: String },
}

/// A parsed path; what cannot be read matches nothing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct JsonPath(Option<Vec<Step>>);

impl JsonPath {
    pub(super) fn parse(text: &str) -> Self {
        let text = text.trim().trim_start_matches('{').trim_end_matches('}');
        Self(parse(text.strip_prefix('$').unwrap_or(text)))
    }

    pub(super) fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        self.all(root).into_iter().next()
    }

    fn all<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        let Some(steps) = &self.0 else {
            return Vec::new();
        };
        steps.iter().fold(vec![root], |found, step| found.into_iter().flat_map(|value| step.of(value)).collect())
    }
}

impl Step {
    fn of<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        match (self, value) {
            (Self::Field(name), _) => value.get(name).into_iter().collect(),
            (Self::Index(index), Value::Array(items)) => {
                let from_end =
                    usize::try_from(index.unsigned_abs()).ok().and_then(|back| items.len().checked_sub(back));
                let at = if *index < 0 { from_end } else { usize::try_from(*index).ok() };
                at.and_then(|at| items.get(at)).into_iter().collect()
            }
            (Self::Every, Value::Array(items)) => items.iter().collect(),
            (Self::Every, Value::Object(map)) => map.values().collect(),
            (Self::Where { path, value }, Value::Array(items)) => {
                let reads = |item: &&Value| {
                    let found = path.iter().try_fold(*item, |node, field| node.get(field));
                    found.is_some_and(|found| match found {
                        Value::String(text) => text == value,
                        other => serde_json::from_str(value).is_ok_and(|wanted: Value| wanted == *other),
                    })
                };
                items.iter().filter(reads).collect()
            }
            _ => Vec::new(),
        }
    }
}

fn parse(mut rest: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    while !rest.is_empty() {
        if let Some(inside) = rest.strip_prefix('[') {
            let end = closing(inside)?;
            steps.push(bracket(&inside[..end])?);
            rest = &inside[end + 1..];
        } else {
            let (name, after) = field(rest.strip_prefix('.').unwrap_or(rest));
            match name.as_str() {
                "" => {}
                "*" => steps.push(Step::Every),
                _ => steps.push(Step::Field(name)),
            }
            if after.len() == rest.len() {
                return None;
            }
            rest = after;
        }
    }
    Some(steps)
}

/// A field name up to the next unescaped dot or bracket.
fn field(text: &str) -> (String, &str) {
    let mut name = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => name.extend(chars.next().map(|(_, escaped)| escaped)),
            '.' | '[' => return (name, &text[at..]),
            _ => name.push(c),
        }
    }
    (name, "")
}

/// Where the bracket ends, outside quotes.
fn closing(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None, ']') => return Some(at),
            _ => {}
        }
    }
    None
}

fn unquoted(text: &str) -> Option<&str> {
    let text = text.trim();
    let strip = |quote: char| text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    strip('\'').or_else(|| strip('"'))
}

fn bracket(inside: &str) -> Option<Step> {
    if inside == "*" {
        return Some(Step::Every);
    }
    if let Some(condition) = inside.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        let (path, value) = condition.split_once("==")?;
        let path = path.trim().strip_prefix("@.")?.split('.').map(str::to_owned).collect();
        let value = unquoted(value).unwrap_or_else(|| value.trim());
        return Some(Step::Where { path, value: value.to_owned() });
    }
    match unquoted(inside) {
        Some(name) => Some(Step::Field(name.replace('\\', ""))),
        None => inside.trim().parse().ok().map(Step::Index),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_of_printer_columns() {
        let object = json!({
            "metadata": {"annotations": {"a.b/c": "dotted"}},
            "spec": {"list": ["one", "two"]},
            "status": {"conditions": [{"type": "A", "status": "1"}, {"type": "Ready", "status": "True"}]},
        });
        for (path, first) in [
            (".spec.list[*]", Some(json!("one"))),
            (".spec.list[1]", Some(json!("two"))),
            (".spec.list[-1]", Some(json!("two"))),
            ("{.spec.list}", Some(json!(["one", "two"]))),
            (".metadata.annotations.a\\.b/c", Some(json!("dotted"))),
            (".metadata.annotations['a.b/c']", Some(json!("dotted"))),
            (".status.conditions[?(@.type==\"Ready\")].status", Some(json!("True"))),
            (".status.conditions[*].type", Some(json!("A"))),
            (".spec.gone[*].x", None),
            (".spec.list[", None),
        ] {
            assert_eq!(JsonPath::parse(path).first(&object), first.as_ref(), "{path}");
        }
    }
}
