//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624, equation 3).
//!
//! Sums are over 16-bit words in memory order, so that they need no byte swap on either endianness.

/// Folds a sum of 16-bit words to 16 bits.
#[inline(always)]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Folds a 64-bit sum, for long runs of words.
#[inline(always)]
pub const fn fold64(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    fold(sum as u32)
}

/// The checksum field after one 32-bit word of what it covers has changed; all values in memory order.
#[inline(always)]
pub const fn replace_u32(checksum: u16, from: u32, to: u32) -> u16 {
    let sum = (!checksum) as u32 + (!from & 0xffff) + (!from >> 16) + (to & 0xffff) + (to >> 16);
    !fold(sum)
}

/// As [`replace_u32`], for one 16-bit word.
#[inline(always)]
pub const fn replace_u16(checksum: u16, from: u16, to: u16) -> u16 {
    !fold((!checksum) as u32 + (!from) as u32 + to as u32)
}

/// The change of a sum when one of its words changes; changes are additive. All values in memory order.
#[inline(always)]
pub const fn change_u32(from: u32, to: u32) -> u64 {
    !from as u64 + to as u64
}

/// As [`change_u32`], for one 16-bit word.
#[inline(always)]
pub const fn change_u16(from: u16, to: u16) -> u64 {
    !from as u64 + to as u64
}

/// The checksum field after a change of the covered words.
#[inline(always)]
pub const fn replace(checksum: u16, change: u64) -> u16 {
    !fold64(!checksum as u64 + change)
}

/// The value x of a checksum field that completing the checksum would write again, x = ~(S + x): in one's complement
/// arithmetic, which is modulo 2^16 - 1 and where half is times 2^15, that is -S/2. `sum` is that of the covered words
/// with the field's present value `old`.
#[inline(always)]
pub const fn fixed_point(sum: u64, old: u16) -> u16 {
    const MODULUS: u64 = 0xffff;
    let rest = (sum + !old as u64) % MODULUS;
    ((MODULUS - rest) * 0x8000 % MODULUS) as u16
}

/// Sum of the 16-bit words of `bytes`; an odd last byte is padded with zero.
#[inline(always)]
pub fn sum(bytes: &[u8]) -> u64 {
    let mut total = 0u64;
    let mut chunks = bytes.chunks_exact(2);
    for pair in &mut chunks {
        if let [a, b] = pair {
            total += u16::from_ne_bytes([*a, *b]) as u64;
        }
    }
    if let [last] = chunks.remainder() {
        total += u16::from_ne_bytes([*last, 0]) as u64;
    }
    total
}

/// Checksum of an IPv4 header without options, in memory order; zero for one whose own checksum is right.
#[inline(always)]
pub fn header(head: &[u8; 20]) -> u16 {
    !fold64(sum(head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completing_writes_the_fixed_point_again() {
        for seed in 1..200u16 {
            let mut bytes: std::vec::Vec<u8> = (0..20u16).map(|i| (i * seed % 251) as u8).collect();
            let old = u16::from_ne_bytes([bytes[16], bytes[17]]);
            let fixed = fixed_point(sum(&bytes), old);
            bytes[16..18].copy_from_slice(&fixed.to_ne_bytes());
            assert_eq!(!fold64(sum(&bytes)), fixed);
        }
    }

    #[test]
    fn incremental_equals_recomputed() {
        let mut head = [0x45u8, 0, 0, 60, 1, 2, 0x40, 0, 64, 6, 0, 0, 10, 244, 1, 10, 198, 51, 100, 10];
        let full = !fold64(sum(&head));
        head[10..12].copy_from_slice(&full.to_ne_bytes());
        assert_eq!(fold64(sum(&head)), 0xffff);
        let from = u32::from_ne_bytes([10, 244, 1, 10]);
        let to = u32::from_ne_bytes([172, 18, 0, 100]);
        head[12..16].copy_from_slice(&to.to_ne_bytes());
        let fixed = replace_u32(full, from, to);
        head[10..12].copy_from_slice(&fixed.to_ne_bytes());
        assert_eq!(fold64(sum(&head)), 0xffff);
        let from = u16::from_ne_bytes([64, 6]);
        let to = u16::from_ne_bytes([63, 6]);
        head[8] = 63;
        head[10..12].copy_from_slice(&replace_u16(fixed, from, to).to_ne_bytes());
        assert_eq!(fold64(sum(&head)), 0xffff);
        let (ids, totals) = ([(1, 2), (7, 0xff)], [60u16, 0xffff]);
        for ((a, b), total) in ids.into_iter().zip(totals) {
            let old = u16::from_ne_bytes([head[10], head[11]]);
            let from = u32::from_ne_bytes([head[2], head[3], head[4], head[5]]);
            let [high, low] = total.to_be_bytes();
            head[2..6].copy_from_slice(&[high, low, a, b]);
            let to = u32::from_ne_bytes([high, low, a, b]);
            let change = change_u32(from, to) + change_u16(5, 9) + change_u16(9, 5);
            head[10..12].copy_from_slice(&replace(old, change).to_ne_bytes());
            assert_eq!(fold64(sum(&head)), 0xffff);
        }
    }
}
