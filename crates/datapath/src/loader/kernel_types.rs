//! The size of a kernel structure from BTF, for a feature that shows nowhere else.
//!
//! BTF (Documentation/bpf/btf.rst) is a header, a sequence of types, and a section of names. A type is three words (offset
//! of its name, kind and number of members, size or type) and data by its kind.

use std::fs;
use std::io;

const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u32 = 0xeb9f;
const STRUCT: u32 = 4;

/// The size in bytes of the structure of this name; `None` if there is none.
pub fn struct_size(name: &str) -> io::Result<Option<u32>> {
    let bytes = fs::read(VMLINUX)?;
    find(&bytes, name).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{VMLINUX}: not as expected")))
}

/// The outer `None` means malformed BTF.
fn find(bytes: &[u8], name: &str) -> Option<Option<u32>> {
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let number = |at: usize| usize::try_from(word(at)?).ok();
    // Sixteen bits of magic, version and flags; then the header's own length, and both sections, counted from its end.
    if word(0)? & 0xffff != MAGIC {
        return None;
    }
    let header = number(4)?;
    let (mut at, names) = (header.checked_add(number(8)?)?, header.checked_add(number(16)?)?);
    let end = at.checked_add(number(12)?)?;
    let is_named = |offset: usize| {
        let rest = bytes.get(names.checked_add(offset)?..)?;
        Some(rest.strip_prefix(name.as_bytes())?.first()? == &0)
    };
    while at < end {
        let (name_at, info, size) = (number(at)?, word(at + 4)?, word(at + 8)?);
        let (kind, parts) = (info >> 24 & 0x1f, usize::try_from(info & 0xffff).ok()?);
        if kind == STRUCT && is_named(name_at) == Some(true) {
            return Some(Some(size));
        }
        at += 12 + added(kind, parts)?;
    }
    Some(None)
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

    /// An integer, a pointer, a structure `b` of two members, and one `bb`.
    fn types() -> Vec<u8> {
        const NAMES: &[u8] = b"\0int\0b\0bb\0";
        let types: [&[u32]; 4] =
            [&[1, 1 << 24, 4, 32], &[0, 2 << 24, 1], &[5, 4 << 24 | 2, 44, 0, 1, 0, 0, 1, 32], &[7, 4 << 24, 8]];
        let types: Vec<u32> = types.concat();
        let length = u32::try_from(types.len() * 4).expect("short");
        let names = u32::try_from(NAMES.len()).expect("short");
        let words = [vec![MAGIC | 1 << 16, 24, 0, length, length, names], types].concat();
        [words.into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>(), NAMES.to_vec()].concat()
    }

    #[test]
    fn a_structure_is_found_by_its_whole_name() {
        let types = types();
        assert_eq!(find(&types, "b"), Some(Some(44)));
        assert_eq!(find(&types, "bb"), Some(Some(8)));
        for other in ["int", "bbb", "nt"] {
            assert_eq!(find(&types, other), Some(None), "{other}");
        }
    }

    #[test]
    fn truncated_or_other_data_is_refused() {
        let types = types();
        assert_eq!(find(&types[..40], "bb"), None);
        assert_eq!(find(b"\x7fELF", "b"), None);
        assert_eq!(find(&[], "b"), None);
    }
}
