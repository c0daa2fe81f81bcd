//! SCTP's checksum, a CRC32c (RFC 9260 section 6.8 and appendix A, before that RFC 4960 appendix B), when ports change.
//!
//! A CRC is the remainder of the message, as a polynomial over GF(2), by a fixed polynomial P. Remainders add up: two
//! messages of one length whose difference is D have remainders whose difference is that of D, and what is mixed in at
//! both ends cancels out. The ports are the first four bytes; where a message of N bytes changes in these only, its CRC
//! changes by their difference times x^8N mod P. So nothing else of the message is read, only its length.
//!
//! Polynomials are written as the CRC works on them, reflected: the highest bit is the coefficient of x^0.

/// P = x^32 + x^28 + x^27 + ... + 1, the Castagnoli polynomial, without x^32.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const ONE: u32 = 1 << 31;

/// x^8n mod P, for n bytes.
static BYTES: [u32; 256] = powers(times_x8(ONE));
/// x^2048n mod P, for n blocks of 256 bytes.
static BLOCKS: [u32; 256] = powers(product(times_x8(ONE), powers(times_x8(ONE))[255]));

#[inline(always)]
const fn times_x(factor: u32) -> u32 {
    (factor >> 1) ^ (POLYNOMIAL & (factor & 1).wrapping_neg())
}

const fn times_x8(factor: u32) -> u32 {
    let (mut result, mut step) = (factor, 0);
    while step < 8 {
        result = times_x(result);
        step += 1;
    }
    result
}

/// The product of two polynomials mod P. Without branches, so that a verifier goes through it once.
#[inline(always)]
const fn product(left: u32, right: u32) -> u32 {
    let (mut rest, mut power, mut sum, mut step) = (left, right, 0, 0);
    while step < u32::BITS {
        sum ^= power & (rest >> 31).wrapping_neg();
        rest <<= 1;
        power = times_x(power);
        step += 1;
    }
    sum
}

/// 1, `base`, `base`^2, ... mod P.
const fn powers(base: u32) -> [u32; 256] {
    let (mut powers, mut place) = ([ONE; 256], 1);
    while place < 256 {
        powers[place] = product(powers[place - 1], base);
        place += 1;
    }
    powers
}

/// The CRC32c of a message of `length` bytes, at most 65,535, once its first four bytes have changed. `difference` is the
/// exclusive or of the old bytes and the new ones; it and `crc` are numbers as SCTP writes its checksum, little-endian.
#[inline(always)]
fn updated(crc: u32, difference: u32, length: u32) -> u32 {
    let bytes = BYTES[(length & 0xff) as usize];
    let blocks = BLOCKS[(length >> 8 & 0xff) as usize];
    crc ^ product(product(difference, bytes), blocks)
}

/// Likewise for the checksum field of an SCTP packet, once its ports have changed. Zero stays zero, which has two
/// meanings: the sender has left the checksum to a device, which computes it later (over the new ports); or both ends
/// have agreed on no checksum (RFC 9653), and refuse any other wrong value. A valid checksum of zero, one in 2^32,
/// looks the same; its packet is lost.
#[inline(always)]
pub fn replace(field: u32, difference: u32, length: u32) -> u32 {
    if field == 0 { 0 } else { updated(field, difference, length) }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// The textbook method: bit by bit, lowest first.
    fn crc32c(message: &[u8]) -> u32 {
        let mut rest = u32::MAX;
        for byte in message {
            rest ^= u32::from(*byte);
            for _ in 0..8 {
                rest = if rest & 1 == 1 { rest >> 1 ^ POLYNOMIAL } else { rest >> 1 };
            }
        }
        !rest
    }

    /// Pseudo-random bytes (a linear congruential generator, Knuth's MMIX).
    fn message(seed: u32, length: usize) -> Vec<u8> {
        let mut state = u64::from(seed);
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        core::iter::repeat_with(next).take(length).collect()
    }

    /// An SCTP packet with its checksum.
    fn sealed(mut packet: Vec<u8>) -> Vec<u8> {
        packet[8..12].fill(0);
        let crc = crc32c(&packet);
        packet[8..12].copy_from_slice(&crc.to_le_bytes());
        packet
    }

    /// Ports and checksum, as numbers.
    fn head(packet: &[u8]) -> (u32, u32) {
        let number = |at: usize| u32::from_le_bytes(packet[at..at + 4].try_into().expect("four bytes"));
        (number(0), number(8))
    }

    #[test]
    fn the_reference_agrees_with_published_values() {
        // Of RFC 3720 appendix B.4, and the check value that catalogues give.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    #[test]
    fn a_published_value_is_reached_from_another_message() {
        let difference = u32::from_le_bytes(*b"1234") ^ u32::from_le_bytes(*b"abcd");
        assert_eq!(updated(crc32c(b"abcd56789"), difference, 9), 0xe306_9283);
    }

    #[test]
    fn correcting_equals_recomputing() {
        let lengths = (12..2000).chain([2048, 4096, 9000, 16_384, 32_767, 65_279, 65_280, 65_281, 65_535]);
        for (seed, length) in (0..).zip(lengths) {
            let old = sealed(message(seed, length));
            let mut new = old.clone();
            // The source port, the destination port, both.
            let changed = [0..2, 2..4, 0..4][seed as usize % 3].clone();
            new[changed].copy_from_slice(&message(!seed, 4)[..if seed % 3 == 2 { 4 } else { 2 }]);
            let ((old_ports, field), (new_ports, _)) = (head(&old), head(&new));
            let corrected = replace(field, old_ports ^ new_ports, length as u32);
            assert_eq!(corrected, head(&sealed(new)).1, "{length} bytes");
            assert_eq!(replace(corrected, old_ports ^ new_ports, length as u32), field, "and back");
            assert_eq!(replace(field, 0, length as u32), field, "nothing changed");
        }
    }

    #[test]
    fn a_wrong_checksum_stays_wrong_and_zero_stays_zero() {
        let ((ports, field), difference) = (head(&sealed(message(7, 100))), 0x0403_0201);
        let right = replace(field, difference, 100);
        assert_ne!((right, ports), (field, difference));
        assert_eq!(replace(field ^ 0x10, difference, 100), right ^ 0x10);
        assert_eq!(replace(0, difference, 100), 0);
    }
}
