//! The configuration, and the numbers that tell whether what was decided still holds: read by name, past the compiler's
//! ideas of what may be read again.
#![expect(unsafe_code, reason = "map access is one of the three places for it; see `maps`")]

use core::ptr;

use egress_common::abi::Config;

use crate::alive::{count_up, fence};
use crate::maps::{CONFIG, USAGE};

/// Says that a flow or a mapping is gone, has been reset, or begins anew, behind that.
#[inline(always)]
pub fn count_turn() {
    if let Some(usage) = USAGE.get_ptr_mut(0) {
        // Not before what it tells of is written: see `fence`.
        fence();
        // SAFETY: see `maps`.
        count_up(unsafe { &raw mut (*usage).turns });
    }
}

/// [`Config::decisions`].
#[inline(always)]
pub fn decisions() -> u32 {
    // Volatile: read here and nowhere else, whatever the compiler would rather do.
    // SAFETY: see `maps`.
    CONFIG.get_ptr(0).map_or(0, |config| unsafe { ptr::read_volatile(&raw const (*config).decisions) })
}

/// [`egress_common::abi::Usage::turns`].
#[inline(always)]
pub fn turns() -> u32 {
    // Volatile, as for `decisions`.
    // SAFETY: see `maps`.
    USAGE.get_ptr(0).map_or(0, |usage| unsafe { ptr::read_volatile(&raw const (*usage).turns) })
}

/// [`Config::route_generation`], read here and now.
#[inline(always)]
pub fn route_generation(config: &Config) -> u32 {
    // SAFETY: a reference is aligned and valid; the agent writes the number meanwhile.
    unsafe { ptr::read_volatile(&raw const config.route_generation) }
}

/// The configuration, once the agent has written it.
#[inline(always)]
pub fn config() -> Option<&'static Config> {
    CONFIG.get(0).filter(|config| config.generation != 0)
}

/// What is left to the stack says that it was seen also before the configuration is written: the table may be there already.
#[inline(always)]
pub fn seen_priority() -> Option<u32> {
    CONFIG.get(0).and_then(Config::seen_priority)
}
