//! Addresses of the cases: each has its own server, second server and router, so that all cases run at once on one node
//! and every packet identifies its case.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses of one case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CaseAddresses {
    pub(crate) v6: bool,
    /// Below [`CASES`].
    pub(crate) index: u16,
    /// Path MTU of 1300 bytes to the servers.
    pub(crate) narrow: bool,
}

/// Maximum number of cases.
pub(crate) const CASES: u16 = 0x1000;
/// MTU of the narrow path.
pub(crate) const NARROW: usize = 1300;
/// Arguments of `ip route add` for the path to all servers, and for the narrow one.
pub(crate) const ROUTES: [&str; 4] = [
    "198.18.0.0/15 via 172.18.0.1",
    "198.18.128.0/17 via 172.18.0.1 mtu lock 1300",
    "2001:db8::/32 via fd00:172:18::1",
    "2001:db8:8000::/33 via fd00:172:18::1 mtu lock 1300",
];

const SERVER: u16 = 0;
const SECOND: u16 = 0x4000;
const NARROW_BIT: u16 = 0x8000;

impl CaseAddresses {
    pub(crate) fn pod(self) -> IpAddr {
        self.pick([10, 244, 1, 10], "fd00:10:244:1::10")
    }

    pub(crate) fn other_pod(self) -> IpAddr {
        self.pick([10, 244, 1, 11], "fd00:10:244:1::11")
    }

    pub(crate) fn egress(self) -> IpAddr {
        self.pick([172, 18, 0, 100], "fd00:172:18::100")
    }

    pub(crate) fn node(self) -> IpAddr {
        self.pick([172, 18, 0, 2], "fd00:172:18::2")
    }

    pub(crate) fn mgmt(self) -> IpAddr {
        self.pick([10, 244, 1, 2], "fd00:10:244:1::2")
    }

    pub(crate) fn server(self) -> IpAddr {
        self.outside(SERVER, 0)
    }

    pub(crate) fn second_server(self) -> IpAddr {
        self.outside(SECOND, 0)
    }

    /// On the path to the servers, after the node's own router.
    pub(crate) fn router(self) -> IpAddr {
        self.outside(SERVER, 1)
    }

    fn pick(self, v4: [u8; 4], v6: &str) -> IpAddr {
        if self.v6 { v6.parse().expect("a literal") } else { IpAddr::from(v4) }
    }

    fn outside(self, role: u16, host: u8) -> IpAddr {
        let narrow = if self.narrow { NARROW_BIT } else { 0 };
        if self.v6 {
            let [role, host] = [role | narrow | self.index, u16::from(host) + 0x10];
            return Ipv6Addr::new(0x2001, 0xdb8, role, 0, 0, 0, 0, host).into();
        }
        // Pairs of addresses, so that no last byte is 0 or 255: 60 cases in a /24 of 256.
        let [high, low] = [self.index / 60, self.index % 60];
        let third = (role | narrow) >> 8 | high;
        let byte = |number: u16| u8::try_from(number).expect("a byte");
        Ipv4Addr::new(198, 18, byte(third), byte(low * 4 + 1) + host).into()
    }

    /// Name of an address.
    pub(crate) fn name(self, address: IpAddr) -> String {
        let known = [
            ("pod", self.pod()),
            ("other-pod", self.other_pod()),
            ("egress", self.egress()),
            ("node", self.node()),
            ("mgmt", self.mgmt()),
            ("server", self.server()),
            ("second-server", self.second_server()),
            ("router", self.router()),
        ];
        known
            .iter()
            .find(|(_, known)| *known == address)
            .map_or_else(|| address.to_string(), |(name, _)| (*name).into())
    }
}

/// The case whose server or router has this address.
pub(crate) fn case_of(address: IpAddr) -> Option<u16> {
    match address {
        IpAddr::V4(address) => match address.octets() {
            [198, 18, third, last] => Some(u16::from(third & 0x3f) * 60 + u16::from(last / 4)),
            _ => None,
        },
        IpAddr::V6(address) => match address.segments() {
            [0x2001, 0xdb8, third, ..] => Some(third & 0x3fff),
            _ => None,
        },
    }
}
