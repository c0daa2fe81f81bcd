//! Rendezvous hashing: of several candidates each key has one, the same on every machine and in every version of the agent.

use std::net::IpAddr;

/// FNV-1a.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

pub fn hash_of_address(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(address) => hash(&address.octets()),
        IpAddr::V6(address) => hash(&address.octets()),
    }
}

/// How much a key prefers a candidate, by the hashes of both: the finisher of splitmix64, so that neighbouring keys prefer
/// different candidates.
pub fn weight(key: u64, candidate: u64) -> u64 {
    let mixed = (key ^ candidate.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
