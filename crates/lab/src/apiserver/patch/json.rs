//! JSON patch (RFC 6902). One operation that does not apply, a failed `test` included, fails the whole patch.

use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub(crate) enum Operation {
    Add {
        path: String,
        value: Value,
    },
    Remove {
        path: String,
    },
    Replace {
        path: String,
        value: Value,
    },
    Move {
        from: String,
        path: String,
    },
    Copy {
        from: String,
        path: String,
    },
    Test {
        path: String,
        #[serde(default)]
        value: Value,
    },
}

/// The operation that did not apply, by its place in the patch.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("operation {0} does not apply")]
pub(crate) struct DoesNotApply(usize);

pub(crate) fn patch(target: &mut Value, operations: &[Operation]) -> Result<(), DoesNotApply> {
    for (index, operation) in operations.iter().enumerate() {
        step(target, operation).ok_or(DoesNotApply(index))?;
    }
    Ok(())
}

fn step(target: &mut Value, operation: &Operation) -> Option<()> {
    match operation {
        Operation::Add { path, value } => add(target, path, value.clone()),
        Operation::Remove { path } => remove(target, path).map(drop),
        Operation::Replace { path, value } => {
            *target.pointer_mut(path)? = value.clone();
            Some(())
        }
        Operation::Move { from, path } => {
            let value = remove(target, from)?;
            add(target, path, value)
        }
        Operation::Copy { from, path } => {
            let value = target.pointer(from)?.clone();
            add(target, path, value)
        }
        // A path that is not there equals null.
        Operation::Test { path, value } => (target.pointer(path).unwrap_or(&Value::Null) == value).then_some(()),
    }
}

fn split(path: &str) -> Option<(&str, String)> {
    let (parent, last) = path.rsplit_once('/')?;
    Some((parent, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Option<()> {
    if path.is_empty() {
        *target = value;
        return Some(());
    }
    let (parent, last) = split(path)?;
    match target.pointer_mut(parent)? {
        Value::Object(map) => {
            map.insert(last, value);
        }
        Value::Array(items) => {
            let index = if last == "-" { items.len() } else { last.parse().ok()? };
            if index > items.len() {
                return None;
            }
            items.insert(index, value);
        }
        _ => return None,
    }
    Some(())
}

fn remove(target: &mut Value, path: &str) -> Option<Value> {
    let (parent, last) = split(path)?;
    match target.pointer_mut(parent)? {
        Value::Object(map) => map.remove(&last),
        Value::Array(items) => {
            let index: usize = last.parse().ok()?;
            (index < items.len()).then(|| items.remove(index))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn patched(target: Value, operations: Value) -> Result<Value, DoesNotApply> {
        let operations: Vec<Operation> = serde_json::from_value(operations).expect("readable operations");
        let mut target = target;
        patch(&mut target, &operations).map(|()| target)
    }

    #[test]
    fn operations_that_apply() {
        for (target, operations, result) in [
            (json!({"a": 1}), json!([{"op": "add", "path": "/b", "value": 2}]), json!({"a": 1, "b": 2})),
            (json!({"a": [1, 3]}), json!([{"op": "add", "path": "/a/1", "value": 2}]), json!({"a": [1, 2, 3]})),
            (json!({"a": [1]}), json!([{"op": "add", "path": "/a/-", "value": 2}]), json!({"a": [1, 2]})),
            (json!({"a": {"b/c": 1}}), json!([{"op": "remove", "path": "/a/b~1c"}]), json!({"a": {}})),
            (json!({"a": 1}), json!([{"op": "move", "from": "/a", "path": "/b"}]), json!({"b": 1})),
            (json!({"a": 1}), json!([{"op": "copy", "from": "/a", "path": "/b"}]), json!({"a": 1, "b": 1})),
            (
                json!({"a": 1}),
                json!([{"op": "test", "path": "/a", "value": 1}, {"op": "replace", "path": "/a", "value": 2}]),
                json!({"a": 2}),
            ),
            (json!({}), json!([{"op": "test", "path": "/gone", "value": null}]), json!({})),
        ] {
            assert_eq!(patched(target, operations), Ok(result));
        }
    }

    #[test]
    fn operations_that_do_not() {
        for operations in [
            json!([{"op": "test", "path": "/a", "value": 2}]),
            json!([{"op": "remove", "path": "/gone"}]),
            json!([{"op": "replace", "path": "/gone", "value": 1}]),
            json!([{"op": "add", "path": "/gone/deeper", "value": 1}]),
            json!([{"op": "add", "path": "/list/5", "value": 1}]),
        ] {
            assert_eq!(patched(json!({"a": 1, "list": []}), operations.clone()), Err(DoesNotApply(0)), "{operations}");
        }
    }
}
