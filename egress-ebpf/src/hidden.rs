//! Numbers that the compiler is to know nothing of, for the sake of the verifier.
//!
//! The compiler compares one register and uses another that it knows to be equal, leaves out a mask that a comparison makes
//! needless, or folds two null checks into one. It is right, and the verifiers (of Linux 6.1 and 6.12 above all) see only
//! that the register in use was never compared.
#![expect(unsafe_code, reason = "an empty step of assembly")]

use core::arch::asm;

/// The same number, from nowhere.
#[inline(always)]
pub fn hidden(number: u64) -> u64 {
    let mut hidden = number;
    // SAFETY: a register is moved to itself.
    unsafe { asm!("{0} = {0}", inout(reg) hidden, options(pure, nomem, nostack, preserves_flags)) };
    hidden
}
