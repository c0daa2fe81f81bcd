//! The object under test: the one that the agent embeds, or one in a file that `cargo xtask mutate` names, so that another
//! object needs no other test binary.

use std::sync::LazyLock;

/// Path of an object to test instead of the embedded one. Only tests look at it.
const VARIABLE: &str = "EGRESS_TEST_OBJECT";

static NAMED: LazyLock<Option<Vec<u8>>> = LazyLock::new(|| {
    let path = std::env::var_os(VARIABLE)?;
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{VARIABLE}: {}: {error}", path.display()));
    assert_eq!(bytes.as_ptr().align_offset(8), 0, "the ELF reader takes references to headers in place");
    Some(bytes)
});

pub(crate) fn bytes() -> &'static [u8] {
    match NAMED.as_deref() {
        Some(bytes) => bytes,
        None => egress_datapath::object::embedded().expect(egress_datapath::object::NOT_EMBEDDED),
    }
}
