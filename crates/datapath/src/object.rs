//! The eBPF object that is part of this binary.
//!
//! `build.rs` copies it here. A binary built before the object, with plain `cargo build` in a fresh clone, has none: such
//! an agent works without the kernel parts, and reports an error when it should load programs.

/// Message for a missing object.
pub const NOT_EMBEDDED: &str = "built without the eBPF object; build with cargo xtask build";

/// The ELF reader takes references to headers in place, so the bytes must be aligned.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/egress-ebpf.o"));

/// The object's bytes; `None` if it was not built.
pub fn embedded() -> Option<&'static [u8]> {
    (!OBJECT.is_empty()).then_some(OBJECT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedded_object_is_an_ebpf_elf_file() {
        let Some(bytes) = embedded() else { return };
        assert_eq!(bytes.get(..4), Some(&b"\x7fELF"[..]));
        assert_eq!(bytes.get(18..20), Some(&[247, 0][..]), "the ELF machine of eBPF");
        assert_eq!(bytes.as_ptr().align_offset(8), 0);
    }
}
