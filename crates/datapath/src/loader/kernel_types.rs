//! The size of a kernel structure, and where its members lie, from BTF: for a feature that shows nowhere else, and for what no
//! helper says about a packet.
//!
//! BTF (Documentation/bpf/btf.rst) is a header, a sequence of types, and a section of names. A type is three words (offset
//! of its name, kind and number of members, size or type) and data by its kind.

use std::fs;
use std::io;

const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u32 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
/// Unions and structures without a name, in one another.
const DEEPEST: u32 = 8;

/// The types of the running kernel.
pub struct KernelTypes {
    bytes: Vec<u8>,
    /// Where each type lies; the first one has the number one.
    types: Vec<usize>,
    /// Where the names begin.
    names: usize,
}

impl KernelTypes {
    pub fn read() -> io::Result<Self> {
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("{VMLINUX}: not as expected"));
        Self::parse(fs::read(VMLINUX)?).ok_or_else(malformed)
    }

    fn parse(bytes: Vec<u8>) -> Option<Self> {
        let mut found = Self { bytes, types: Vec::new(), names: 0 };
        // Sixteen bits of magic, version and flags; then the header's own length, and both sections, counted from its end.
        if found.word(0)? & 0xffff != MAGIC {
            return None;
        }
        let header = found.number(4)?;
        let mut at = header.checked_add(found.number(8)?)?;
        found.names = header.checked_add(found.number(16)?)?;
        let end = at.checked_add(found.number(12)?)?;
        while at < end {
            found.types.push(at);
            let (kind, parts) = found.kind(at)?;
            at += 12 + added(kind, parts)?;
        }
        Some(found)
    }

    /// The size in bytes of the structure of this name.
    pub fn struct_size(&self, name: &str) -> Option<u32> {
        self.word(self.structure(name)? + 8)
    }

    /// Where this member of the structure lies, in bytes, also in a structure or union without a name.
    pub fn member_offset(&self, structure: &str, member: &str) -> Option<u32> {
        self.member(self.structure(structure)?, member, DEEPEST)
    }

    fn structure(&self, name: &str) -> Option<usize> {
        let is_it = |at: &&usize| self.kind(**at).is_some_and(|(kind, _)| kind == STRUCT) && self.is_named(**at, name);
        self.types.iter().find(is_it).copied()
    }

    fn member(&self, at: usize, name: &str, depth: u32) -> Option<u32> {
        let (kind, parts) = self.kind(at)?;
        if depth == 0 || !matches!(kind, STRUCT | UNION) {
            return None;
        }
        (0..parts).map(|number| at + 12 + 12 * number).find_map(|part| {
            // The upper bits are the size of a bit field, where the structure has such.
            let bits = self.word(part + 8)? & 0x00ff_ffff;
            if self.is_named(part, name) {
                return bits.is_multiple_of(8).then_some(bits / 8);
            }
            let inner = self.types.get(self.number(part + 4)?.checked_sub(1)?)?;
            if self.word(part)? == 0 { Some(bits / 8 + self.member(*inner, name, depth - 1)?) } else { None }
        })
    }

    /// The kind of a type, and the number of its parts.
    fn kind(&self, at: usize) -> Option<(u32, usize)> {
        let info = self.word(at + 4)?;
        Some((info >> 24 & 0x1f, usize::try_from(info & 0xffff).ok()?))
    }

    fn is_named(&self, at: usize, name: &str) -> bool {
        let rest = self.number(at).and_then(|offset| self.bytes.get(self.names.checked_add(offset)?..));
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes())).is_some_and(|rest| rest.first() == Some(&0))
    }

    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(self.bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
    }

    fn number(&self, at: usize) -> Option<usize> {
        usize::try_from(self.word(at)?).ok()
    }
}

/// Bytes that the kind adds to a type.
fn added(kind: u32, parts: usize) -> Option<usize> {
    Some(match kind {
        // Pointers, forwards, typedefs, qualifiers, functions, floats, type tags.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections of data, enumerations of 64 bits.
        4 | 5 | 15 | 19 => 12 * parts,
        // Enumerations, prototypes.
        6 | 13 => 8 * parts,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An integer, a pointer, a structure `b` of an integer and a union of two integers, that union, and a structure `bb`.
    fn types() -> Vec<u8> {
        const NAMES: &[u8] = b"\0int\0b\0bb\0one\0other\0bit\0";
        let types: [&[u32]; 5] = [
            &[1, 1 << 24, 4, 32],
            &[0, 2 << 24, 1],
            &[5, 4 << 24 | 2, 44, 10, 1, 0, 0, 4, 64],
            &[0, 5 << 24 | 2, 8, 14, 1, 32, 20, 1, 3 << 24 | 7],
            &[7, 4 << 24, 8],
        ];
        let types: Vec<u32> = types.concat();
        let length = u32::try_from(types.len() * 4).expect("short");
        let names = u32::try_from(NAMES.len()).expect("short");
        let words = [vec![MAGIC | 1 << 16, 24, 0, length, length, names], types].concat();
        [words.into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>(), NAMES.to_vec()].concat()
    }

    #[test]
    fn a_structure_is_found_by_its_whole_name() {
        let types = KernelTypes::parse(types()).expect("BTF");
        assert_eq!(types.struct_size("b"), Some(44));
        assert_eq!(types.struct_size("bb"), Some(8));
        for other in ["int", "bbb", "nt"] {
            assert_eq!(types.struct_size(other), None, "{other}");
        }
    }

    #[test]
    fn a_member_is_found_in_parts_without_a_name() {
        let types = KernelTypes::parse(types()).expect("BTF");
        assert_eq!(types.member_offset("b", "one"), Some(0));
        assert_eq!(types.member_offset("b", "other"), Some(12));
        for (structure, member) in [("b", "bit"), ("b", "two"), ("bb", "one"), ("c", "one")] {
            assert_eq!(types.member_offset(structure, member), None, "{structure}.{member}");
        }
    }

    #[test]
    fn the_running_kernel_says_where_a_packet_has_its_checksum() {
        let types = KernelTypes::read().expect("BTF of the running kernel");
        let of = |member| types.member_offset("sk_buff", member).expect("a member");
        assert_eq!((of("csum_offset"), of("data")), (of("csum_start") + 2, of("head") + 8));
        assert_eq!(of("csum"), of("csum_start"));
    }

    #[test]
    fn truncated_or_other_data_is_refused() {
        let types = types();
        assert!(KernelTypes::parse(types[..40].to_vec()).is_none());
        assert!(KernelTypes::parse(b"\x7fELF".to_vec()).is_none());
        assert!(KernelTypes::parse(Vec::new()).is_none());
    }
}
