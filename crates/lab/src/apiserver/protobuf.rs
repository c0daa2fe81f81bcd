//! Just enough protobuf to read what `kubectl create namespace`, `configmap` and `serviceaccount` send.
//!
//! kubectl's typed clients write built-in kinds as protobuf and have no way back to JSON. The envelope is `k8s\0` and a message
//! with the type (1) and the object (2); the fields below are those that these commands fill. Other kinds are answered 415:
//! from manifests kubectl sends JSON.

use serde_json::{Map, Value, json};

use super::meta;

const MAGIC: &[u8] = b"k8s\0";

#[derive(Clone, Copy)]
enum Field {
    Text(&'static str),
    Texts(&'static str),
    TextMap(&'static str),
    Message(&'static str, &'static [(u64, Field)]),
}

const METADATA: &[(u64, Field)] = &[
    (1, Field::Text("name")),
    (2, Field::Text("generateName")),
    (3, Field::Text("namespace")),
    (11, Field::TextMap("labels")),
    (12, Field::TextMap("annotations")),
    (14, Field::Texts("finalizers")),
];
const TYPE: &[(u64, Field)] = &[(1, Field::Text("apiVersion")), (2, Field::Text("kind"))];
const PLAIN: &[(u64, Field)] = &[(1, Field::Message("metadata", METADATA))];
const CONFIG_MAP: &[(u64, Field)] = &[(1, Field::Message("metadata", METADATA)), (2, Field::TextMap("data"))];

/// The object in the envelope; none where it is of another kind or cannot be read.
pub(super) fn decode(body: &[u8]) -> Option<Value> {
    let envelope = body.strip_prefix(MAGIC)?;
    let (mut object, mut raw) = (json!({}), None);
    for part in Parts(envelope) {
        match part? {
            (1, bytes) => object = message(bytes, TYPE)?,
            (2, bytes) => raw = Some(bytes),
            _ => {}
        }
    }
    let fields = match meta::text(&object, "/kind") {
        "Namespace" | "ServiceAccount" => PLAIN,
        "ConfigMap" => CONFIG_MAP,
        _ => return None,
    };
    let Value::Object(content) = message(raw?, fields)? else { return None };
    meta::as_map(&mut object).extend(content);
    Some(object)
}

fn message(bytes: &[u8], fields: &[(u64, Field)]) -> Option<Value> {
    let mut object = Map::new();
    for part in Parts(bytes) {
        let (number, bytes) = part?;
        let Some((_, field)) = fields.iter().find(|(known, _)| *known == number) else { continue };
        let text = || String::from_utf8(bytes.to_vec()).ok();
        match *field {
            Field::Text(_) if bytes.is_empty() => {}
            Field::Text(name) => drop(object.insert(name.to_owned(), json!(text()?))),
            Field::Texts(name) => {
                let list = object.entry(name).or_insert_with(|| json!([]));
                list.as_array_mut()?.push(json!(text()?));
            }
            Field::TextMap(name) => {
                let entry = message(bytes, &[(1, Field::Text("key")), (2, Field::Text("value"))])?;
                let map = meta::as_map(object.entry(name).or_insert_with(|| json!({})));
                map.insert(meta::text(&entry, "/key").to_owned(), json!(meta::text(&entry, "/value")));
            }
            Field::Message(name, fields) => drop(object.insert(name.to_owned(), message(bytes, fields)?)),
        }
    }
    Some(Value::Object(object))
}

/// The fields of a message: number and content, which is empty for numbers.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn part(&mut self) -> Option<(u64, &'a [u8])> {
        let tag = self.varint()?;
        let content = match tag & 7 {
            0 => self.varint().map(|_| &[][..]),
            1 => self.take(8).map(|_| &[][..]),
            2 => {
                let length = self.varint()?;
                self.take(usize::try_from(length).ok()?)
            }
            5 => self.take(4).map(|_| &[][..]),
            _ => None,
        };
        Some((tag >> 3, content?))
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = Option<(u64, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let part = self.part();
        if part.is_none() {
            self.0 = &[];
        }
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let length = u8::try_from(content.len()).expect("short content");
        [&[number << 3 | 2, length], content].concat()
    }

    #[test]
    fn a_namespace_as_kubectl_sends_it() {
        let label = [field(1, b"env"), field(2, b"prod")].concat();
        let metadata = [field(1, b"web"), field(2, b""), vec![7 << 3, 0], field(11, &label)].concat();
        let namespace = [field(1, &metadata), field(2, b""), field(3, b"")].concat();
        let about = [field(1, b"v1"), field(2, b"Namespace")].concat();
        let body = [MAGIC.to_vec(), field(1, &about), field(2, &namespace)].concat();
        let expected =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "web", "labels": {"env": "prod"}}});
        assert_eq!(decode(&body), Some(expected));
        assert_eq!(decode(&body[..body.len() - 1]), None, "cut short");
        assert_eq!(decode(b"{}"), None);
    }
}
