//! See egress-fuzz.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| egress_fuzz::router(data));
