//! Neighbour states of the kernel (linux/neighbour.h).

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use bytes::{BufMut, BytesMut};

use crate::attach::filters;

const NETLINK_HEADER: usize = 16;
/// `struct ndmsg`, and where the state lies.
const HEADER: usize = 12;
const STATE: usize = 8;
const DESTINATION: u16 = 1;

/// By address; of an address on several devices, some one of them.
pub(super) fn all() -> io::Result<BTreeMap<IpAddr, &'static str>> {
    let length = u32::try_from(NETLINK_HEADER + HEADER).map_err(io::Error::other)?;
    let mut request = BytesMut::with_capacity(NETLINK_HEADER + HEADER);
    request.put_u32_ne(length);
    request.put_u16_ne(libc::RTM_GETNEIGH);
    request.put_u16_ne(u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_DUMP).map_err(io::Error::other)?);
    // No number, no family, no device.
    request.put_bytes(0, NETLINK_HEADER - 8 + HEADER);
    Ok(filters::talk(&request)?.iter().filter_map(|message| neighbour(message)).collect())
}

fn neighbour(message: &[u8]) -> Option<(IpAddr, &'static str)> {
    let address = filters::attribute(message, HEADER, DESTINATION)?;
    let address = match (<[u8; 4]>::try_from(address.as_slice()), <[u8; 16]>::try_from(address.as_slice())) {
        (Ok(four), _) => IpAddr::from(four),
        (_, Ok(sixteen)) => IpAddr::from(sixteen),
        _ => return None,
    };
    let state = u16::from_ne_bytes(message.get(STATE..STATE + 2)?.try_into().ok()?);
    Some((address, word(state)?))
}

/// One bit is set. Others say nothing of whether the neighbour is there.
const fn word(state: u16) -> Option<&'static str> {
    Some(match state {
        0x01 => "not answering yet",
        0x02 => "reachable",
        0x04 => "stale",
        0x08 | 0x10 => "being asked",
        0x20 => "failed",
        0x80 => "permanent",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_has_an_address_and_a_state() {
        let message = |state: u16| {
            let mut bytes = vec![2, 0, 0, 0, 11, 0, 0, 0];
            bytes.extend(state.to_ne_bytes());
            bytes.extend([0, 1]);
            bytes.extend(8_u16.to_ne_bytes());
            bytes.extend(DESTINATION.to_ne_bytes());
            bytes.extend([172, 18, 0, 3]);
            bytes
        };
        let address = IpAddr::from([172, 18, 0, 3]);
        assert_eq!(neighbour(&message(0x02)), Some((address, "reachable")));
        assert_eq!(neighbour(&message(0x20)), Some((address, "failed")));
        assert_eq!((neighbour(&message(0x40)), neighbour(&[0; 12])), (None, None), "no ARP there, nothing at all");
    }
}
