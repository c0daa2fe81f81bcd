//! What an nftables table has in the kernel, for CHECK: compared with what the kernel makes of the same messages in a namespace of
//! its own, so that nothing here has to know how it stores them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use egress_datapath::netlink::{self, NETLINK_NETFILTER};
use rtnetlink::packet_core::{NLM_F_DUMP, NetlinkSerializable, NlasIterator};

/// `struct nfgenmsg`: family, version, resource.
const GENERIC: usize = 4;
const FAMILY_INET: u8 = 1;
const SUBSYSTEM: u16 = 10 << 8;
const GET_RULE: u16 = 7;
const GET_SET: u16 = 10;
const GET_ELEMENT: u16 = 13;

/// `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`, `NFTA_SET_ELEM_LIST_TABLE`.
const TABLE: u16 = 1;
/// `NFTA_RULE_CHAIN`, `NFTA_SET_NAME`, `NFTA_SET_ELEM_LIST_SET`.
const CHAIN_OR_SET: u16 = 2;
/// `NFTA_RULE_EXPRESSIONS`.
const EXPRESSIONS: u16 = 4;
/// `NFTA_SET_ELEM_LIST_ELEMENTS`.
const ELEMENTS: u16 = 3;
/// `NFTA_EXPR_NAME`.
const EXPRESSION_NAME: u16 = 1;
/// `NLA_F_NESTED`, which some kernels set in answers and others do not.
const KIND: u16 = 0x3fff;

/// The rules of each chain in their order, and the elements of each set.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TableContent {
    chains: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
    sets: BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>>,
}

impl TableContent {
    /// Of the calling thread's namespace.
    pub fn of(table: &str) -> io::Result<Self> {
        let mut content = Self::default();
        for rule in list(GET_RULE, table, None)? {
            let attributes = attributes(rule.get(GENERIC..).unwrap_or_default());
            if attributes.get(&TABLE).is_some_and(|name| is(name, table)) {
                let chain = attributes.get(&CHAIN_OR_SET).cloned().unwrap_or_default();
                let expressions = attributes.get(&EXPRESSIONS).map(Vec::as_slice).unwrap_or_default();
                content.chains.entry(chain).or_default().push(without_counts(expressions));
            }
        }
        for set in list(GET_SET, table, None)? {
            let attributes = attributes(set.get(GENERIC..).unwrap_or_default());
            if !attributes.get(&TABLE).is_some_and(|name| is(name, table)) {
                continue;
            }
            let name = attributes.get(&CHAIN_OR_SET).cloned().unwrap_or_default();
            let elements = content.sets.entry(name.clone()).or_default();
            for some in list(GET_ELEMENT, table, Some(&name))? {
                let attributes = self::attributes(some.get(GENERIC..).unwrap_or_default());
                let of_message = attributes.get(&ELEMENTS).map(Vec::as_slice).unwrap_or_default();
                elements.extend(nested(of_message));
            }
        }
        Ok(content)
    }

    /// What differs from what should be, in words.
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let text = |name: &[u8]| String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
        let mut all = Vec::new();
        let names: BTreeSet<&Vec<u8>> = self.chains.keys().chain(expected.chains.keys()).collect();
        for name in names {
            let rules = |of: &Self| of.chains.get(name).cloned().unwrap_or_default();
            let (has, should) = (rules(self), rules(expected));
            let first = has.iter().zip(&should).position(|(has, should)| has != should);
            match first {
                Some(at) => all.push(format!("rule {} of chain {} is another one", at + 1, text(name))),
                None if has.len() != should.len() => {
                    all.push(format!("chain {} has {} rules instead of {}", text(name), has.len(), should.len()));
                }
                None => {}
            }
        }
        let names: BTreeSet<&Vec<u8>> = self.sets.keys().chain(expected.sets.keys()).collect();
        for name in names {
            let elements = |of: &Self| of.sets.get(name).cloned().unwrap_or_default();
            let (has, should) = (elements(self), elements(expected));
            if has != should {
                let (lacks, more) = (should.difference(&has).count(), has.difference(&should).count());
                all.push(format!("set {} lacks {lacks} elements and has {more} others", text(name)));
            }
        }
        all
    }
}

/// A request for everything of a kind.
struct List {
    kind: u16,
    attributes: Vec<u8>,
}

impl NetlinkSerializable for List {
    fn message_type(&self) -> u16 {
        SUBSYSTEM | self.kind
    }

    fn buffer_len(&self) -> usize {
        GENERIC + self.attributes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let (header, attributes) = buffer.split_at_mut(GENERIC);
        header.copy_from_slice(&[FAMILY_INET, 0, 0, 0]);
        attributes.copy_from_slice(&self.attributes);
    }
}

fn list(kind: u16, table: &str, set: Option<&[u8]>) -> io::Result<Vec<Vec<u8>>> {
    let mut attributes = attribute(TABLE, &[table.as_bytes(), &[0]].concat());
    attributes.extend(set.map(|set| attribute(CHAIN_OR_SET, set)).unwrap_or_default());
    match netlink::request(NETLINK_NETFILTER, NLM_F_DUMP, List { kind, attributes }) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// An attribute: its length, kind, content, and padding to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attributes(bytes: &[u8]) -> BTreeMap<u16, Vec<u8>> {
    let all = NlasIterator::new(bytes).flatten();
    all.map(|one| (one.kind() & KIND, one.value().to_vec())).collect()
}

/// The contents of a list.
fn nested(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    NlasIterator::new(bytes).flatten().map(|one| one.value().to_vec())
}

/// Names end with a zero byte.
fn is(name: &[u8], text: &str) -> bool {
    name.strip_suffix(&[0]).unwrap_or(name) == text.as_bytes()
}

/// Expressions, where counters have no content.
fn without_counts(expressions: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    for content in nested(expressions) {
        let name = attributes(&content).remove(&EXPRESSION_NAME).unwrap_or_default();
        kept.extend_from_slice(if is(&name, "counter") { &name } else { &content });
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expression(name: &str, data: &[u8]) -> Vec<u8> {
        let content = [attribute(EXPRESSION_NAME, &[name.as_bytes(), &[0]].concat()), attribute(2, data)].concat();
        attribute(1, &content)
    }

    #[test]
    fn counts_are_no_difference() {
        let rule = |count, other| [expression("cmp", &[other]), expression("counter", &[count])].concat();
        assert_eq!(without_counts(&rule(1, 5)), without_counts(&rule(9, 5)));
        assert_ne!(without_counts(&rule(1, 5)), without_counts(&rule(1, 6)));
    }

    #[test]
    fn differences_name_what_they_are_in() {
        let content = |rules: &[u8], elements: &[u8]| TableContent {
            chains: BTreeMap::from([(b"forward\0".to_vec(), rules.iter().map(|rule| vec![*rule]).collect())]),
            sets: BTreeMap::from([(b"allowed4\0".to_vec(), elements.iter().map(|one| vec![*one]).collect())]),
        };
        let expected = content(&[1, 2, 3], &[1, 2]);
        assert!(content(&[1, 2, 3], &[2, 1]).differences(&expected).is_empty());
        assert_eq!(content(&[1, 9, 3], &[1, 2]).differences(&expected), ["rule 2 of chain forward is another one"]);
        assert_eq!(content(&[1, 2], &[1, 2]).differences(&expected), ["chain forward has 2 rules instead of 3"]);
        assert_eq!(
            content(&[1, 2, 3], &[1, 7]).differences(&expected),
            ["set allowed4 lacks 1 elements and has 1 others"]
        );
        assert_eq!(TableContent::default().differences(&expected).len(), 2);
    }
}
