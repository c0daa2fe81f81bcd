//! The router of the nodes' network, which asks all nodes repeatedly for an egress IP, by ARP or neighbour discovery: nodes that
//! claim the address answer. The questions are hand-made frames, so that the router's neighbour table, and packets that wait for
//! it, stay unchanged.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::socket::{MsgFlags, send};

use super::packet;
use crate::background::Background;
use crate::topology::EXT_LAN;
use crate::topology::addresses::EXT;
use crate::topology::lab::Lab;
use crate::topology::netns::packet_socket;

/// How often it asks.
const EVERY: Duration = Duration::from_millis(20);
/// RFC 4861 section 4.3, and the option of section 4.6.1.
pub(crate) const SOLICITATION: u8 = 135;
const SOURCE_LINK_ADDRESS: [u8; 2] = [1, 1];
/// Where the hop limit is, after the EtherType, and what it must be.
pub(crate) const HOP_LIMIT: (usize, u8) = (2 + 7, 255);

/// Asks until it is finished or dropped.
pub struct NeighbourRequests(Background<()>);

impl NeighbourRequests {
    pub fn start(lab: &Lab, addresses: &[IpAddr]) -> Result<Self> {
        let (socket, mac) = packet_socket(lab.ext(), EXT_LAN, None)?;
        let frames = addresses.iter().map(|address| question(mac, *address)).collect::<Result<Vec<_>>>()?;
        let ask = move |stop: &AtomicBool| {
            while !stop.load(Ordering::Relaxed) {
                for frame in &frames {
                    send(socket.as_raw_fd(), frame, MsgFlags::empty()).context("cannot ask who has an address")?;
                }
                thread::sleep(EVERY);
            }
            Ok(())
        };
        Background::start("neighbour", ask).map(Self)
    }

    pub fn finish(self) -> Result<()> {
        self.0.finish()
    }
}

/// The group that an IPv6 address is asked for in (RFC 4291 section 2.7.1), and its link address (RFC 2464 section 7).
pub(crate) fn solicited_node(address: Ipv6Addr) -> (Ipv6Addr, [u8; 6]) {
    let [.., high, middle, low] = address.octets();
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(high), u16::from_be_bytes([middle, low]));
    (group, [0x33, 0x33, 0xff, high, middle, low])
}

/// A frame that asks for an address.
pub(crate) fn question(mac: [u8; 6], address: IpAddr) -> Result<Vec<u8>> {
    let own = EXT.towards(address);
    match address {
        IpAddr::V4(v4) => {
            // RFC 826: a request, Ethernet and IPv4.
            let head = [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1];
            let (from, to) = (packet::octets(own), v4.octets());
            Ok([&[0xff; 6], &mac[..], &head, &mac, &from, &[0; 6], &to].concat())
        }
        IpAddr::V6(v6) => {
            let (group, group_mac) = solicited_node(v6);
            let body = [&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0], &v6.octets()[..], &SOURCE_LINK_ADDRESS, &mac].concat();
            let body = packet::summed(own, group.into(), packet::ICMPV6, body, 2);
            let mut packet = packet::ip(own, group.into(), packet::ICMPV6, &body)?;
            packet[HOP_LIMIT.0] = HOP_LIMIT.1;
            Ok([&group_mac, &mac[..], &packet].concat())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::dissect::{CapturedFrame, Checksum, dissect};

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

    #[test]
    fn questions_are_read_as_they_were_meant() {
        let v4: IpAddr = [172, 18, 0, 110].into();
        let frame = question(MAC, v4).expect("a frame");
        let CapturedFrame::Arp { request: true, sender, target, .. } = dissect(&frame) else { panic!("{frame:02x?}") };
        assert_eq!((IpAddr::from(sender), IpAddr::from(target)), (EXT.v4.into(), v4));
        let v6: IpAddr = "fd00:172:18::1:2345".parse().expect("a literal");
        let frame = question(MAC, v6).expect("a frame");
        let CapturedFrame::Ip(seen) = dissect(&frame) else { panic!("{frame:02x?}") };
        assert_eq!((seen.source, seen.destination.to_string()), (EXT.v6.into(), "ff02::1:ff01:2345".to_owned()));
        assert_eq!((seen.checksum, seen.source_port), (Checksum::Complete, SOLICITATION.into()));
    }
}
