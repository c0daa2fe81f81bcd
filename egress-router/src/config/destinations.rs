//! The grammar of destinations: what is redirected, and what may be reached.
//!
//! ```text
//! redirect   PORT[-PORT] PROTOCOL ADDRESS [TARGET-PORT]     8080 tcp 203.0.113.26 80
//!            PORT[-PORT] PROTOCOL ADDRESS:TARGET-PORT       8080 tcp [2001:db8::1]:80
//!            ADDRESS                                        everything else; the last entry of its family
//! allow      CIDR [PROTOCOL [PORT[-PORT]]]                  203.0.113.0/24 tcp 443
//! ```
//!
//! Blanks separate, as many as there are; empty entries and those that begin with `#` are comments; protocols are `tcp`, `udp`
//! and `sctp` in any case. An address may have the prefix length of a single host. This is more than what the router of
//! OpenShift SDN and its CNI plugin take, and everything that they take means the same here.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use egress_core::model::state::{Family, family_of};
use ipnet::IpNet;

/// Ports that all entries may have together: each is an element of a map in the kernel.
pub const MOST_PORTS: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp = 6,
    Udp = 17,
    Sctp = 132,
}

impl Protocol {
    fn of(text: &str) -> Result<Self, String> {
        let all = [Self::Tcp, Self::Udp, Self::Sctp];
        let found = all.into_iter().find(|one| one.to_string().eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("{text:?} is none of tcp, udp and sctp"))
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// Where connections to the pod go instead, by what they are made to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirects {
    pub ports: BTreeMap<(Family, Protocol, u16), SocketAddr>,
    /// All others.
    pub fallback: BTreeMap<Family, IpAddr>,
}

impl Redirects {
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.fallback.is_empty()
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// The entry is invalid, or another one has its port already.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        match RedirectEntry::of(text)? {
            RedirectEntry::Comment => Ok(()),
            RedirectEntry::Fallback(address) => self.set_fallback(address),
            RedirectEntry::Ports { protocol, ports, target, target_port } => {
                let family = family_of(target);
                if self.fallback.contains_key(&family) {
                    return Err(format!(
                        "{text:?} follows an address without a port, which takes everything else: that one comes last"
                    ));
                }
                if self.ports.len() + ports.len() > MOST_PORTS {
                    return Err(format!("{text:?}: more than {MOST_PORTS} ports in all"));
                }
                for port in ports {
                    let to = SocketAddr::new(target, target_port.unwrap_or(port));
                    if let Some(other) = self.ports.insert((family, protocol, port), to) {
                        return Err(format!("{text:?}: port {port} {protocol} goes to {other} already"));
                    }
                }
                Ok(())
            }
        }
    }

    /// What takes everything that has no port of its own.
    ///
    /// # Errors
    /// There is one already.
    pub fn set_fallback(&mut self, address: IpAddr) -> Result<(), String> {
        match self.fallback.insert(family_of(address), address) {
            None => Ok(()),
            Some(other) => Err(format!("{address} would take everything else, as {other} already does")),
        }
    }

    /// Every address that connections are sent to.
    pub fn targets(&self) -> impl Iterator<Item = IpAddr> {
        self.ports.values().map(SocketAddr::ip).chain(self.fallback.values().copied())
    }
}

enum RedirectEntry {
    Comment,
    Fallback(IpAddr),
    Ports { protocol: Protocol, ports: RangeInclusive<u16>, target: IpAddr, target_port: Option<u16> },
}

impl RedirectEntry {
    fn of(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is neither \"PORT PROTOCOL ADDRESS [TARGET-PORT]\" nor \"ADDRESS\"");
        let quoted = |why: String| format!("{text:?}: {why}");
        let fields: Vec<&str> = text.split_whitespace().collect();
        let (ports, protocol, target, target_port) = match fields[..] {
            [] => return Ok(Self::Comment),
            [first, ..] if first.starts_with('#') => return Ok(Self::Comment),
            [address] => return host(address).map(Self::Fallback).map_err(quoted),
            [ports, protocol, target] => (ports, protocol, target, None),
            [ports, protocol, target, target_port] => (ports, protocol, target, Some(target_port)),
            _ => return Err(form()),
        };
        let ports = port_range(ports).map_err(quoted)?;
        let protocol = Protocol::of(protocol).map_err(quoted)?;
        let socket = target.parse::<SocketAddr>().ok().filter(|_| target_port.is_none());
        let (target, target_port) = match socket {
            Some(socket) if socket.port() == 0 => return Err(quoted("port 0 is no port".to_owned())),
            Some(socket) => (canonical(socket.ip()).map_err(quoted)?, Some(socket.port())),
            None => (host(target).map_err(quoted)?, target_port.map(port).transpose().map_err(quoted)?),
        };
        if target_port.is_some() && ports.len() > 1 {
            return Err(quoted("a range of ports goes to the same ports: leave out the last one".to_owned()));
        }
        Ok(Self::Ports { protocol, ports, target, target_port })
    }
}

/// What may be reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allowed {
    pub network: IpNet,
    /// All if `None`.
    pub protocol: Option<Protocol>,
    /// First and last; all if `None`.
    pub ports: Option<(u16, u16)>,
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.network.fmt(f)?;
        if let Some(protocol) = self.protocol {
            write!(f, " {protocol}")?;
        }
        match self.ports {
            Some((first, last)) if first == last => write!(f, " {first}"),
            Some((first, last)) => write!(f, " {first}-{last}"),
            None => Ok(()),
        }
    }
}

impl Allowed {
    /// Reads an entry; `None` for a comment.
    ///
    /// # Errors
    /// The entry is invalid.
    pub fn of(text: &str) -> Result<Option<Self>, String> {
        let fields: Vec<&str> = text.split_whitespace().collect();
        let quoted = |why: String| format!("{text:?}: {why}");
        let (network, protocol, ports) = match fields[..] {
            [] => return Ok(None),
            [first, ..] if first.starts_with('#') => return Ok(None),
            [network] => (network, None, None),
            [network, protocol] => (network, Some(protocol), None),
            [network, protocol, ports] => (network, Some(protocol), Some(ports)),
            _ => return Err(format!("{text:?} is not \"CIDR [PROTOCOL [PORT[-PORT]]]\"")),
        };
        let network = self::network(network).map_err(quoted)?;
        let protocol = protocol.map(Protocol::of).transpose().map_err(quoted)?;
        let ports = ports.map(port_range).transpose().map_err(quoted)?.map(RangeInclusive::into_inner);
        Ok(Some(Self { network, protocol, ports }))
    }

    /// What both allow.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let network = match (self.network.contains(&other.network), other.network.contains(&self.network)) {
            (true, _) => other.network,
            (_, true) => self.network,
            (false, false) => return None,
        };
        let protocol = match (self.protocol, other.protocol) {
            (Some(one), Some(another)) if one != another => return None,
            (one, another) => one.or(another),
        };
        let ports = match (self.ports, other.ports) {
            (Some((first, last)), Some((other_first, other_last))) => {
                let (first, last) = (first.max(other_first), last.min(other_last));
                Some((first, last)).filter(|_| first <= last).map(Some)?
            }
            (one, another) => one.or(another),
        };
        Some(Self { network, protocol, ports })
    }
}

/// A network; an address is the network of it alone.
pub fn network(text: &str) -> Result<IpNet, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return canonical(address).map(IpNet::from);
    }
    let net: IpNet = text.parse().map_err(|_| format!("{text:?} is no CIDR"))?;
    canonical(net.addr())?;
    Ok(net.trunc())
}

/// The address of one host, with or without its prefix length.
pub fn host(text: &str) -> Result<IpAddr, String> {
    let address = match text.parse::<IpAddr>() {
        Ok(address) => address,
        Err(_) => match text.parse::<IpNet>() {
            Ok(net) if net.prefix_len() == net.max_prefix_len() => net.addr(),
            Ok(net) => return Err(format!("{net} is a network, where the address of one host is needed")),
            Err(_) => return Err(format!("{text:?} is no IP address")),
        },
    };
    let address = canonical(address)?;
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        return Err(format!("{address} is the address of no host"));
    }
    Ok(address)
}

/// IPv4 in IPv6 would be a third family.
fn canonical(address: IpAddr) -> Result<IpAddr, String> {
    match address {
        IpAddr::V6(six) if six.to_ipv4_mapped().is_some() => {
            Err(format!("{address} is an IPv4 address: write it as one"))
        }
        address => Ok(address),
    }
}

/// Only digits: other parsers take a sign.
fn port(text: &str) -> Result<u16, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse::<u16>().ok().filter(|port| is_number && *port > 0);
    port.ok_or_else(|| format!("{text:?} is no port from 1 to 65535"))
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let Some((first, last)) = text.split_once('-') else {
        let one = port(text)?;
        return Ok(one..=one);
    };
    let (first, last) = (port(first)?, port(last)?);
    if last < first {
        return Err(format!("{text:?}: the first port is above the last one"));
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirects(entries: &[&str]) -> Result<Redirects, String> {
        let mut all = Redirects::default();
        entries.iter().try_for_each(|entry| all.add(entry)).map(|()| all)
    }

    fn socket(text: &str) -> SocketAddr {
        text.parse().expect("an address and a port")
    }

    #[test]
    fn every_form_is_read() {
        let all = redirects(&[
            "# a comment",
            "",
            "80 tcp 203.0.113.25",
            "8080   TCP  203.0.113.26 80 ",
            "53 udp 203.0.113.25/32",
            "5000 SCTP 203.0.113.26",
            "8443 tcp [2001:db8::1]:443",
            "8444 tcp 203.0.113.26:443",
            "9000-9002 udp 2001:db8::2",
            "203.0.113.27",
            "2001:db8::3/128",
        ])
        .expect("all are valid");
        let to = |family, protocol, port| all.ports.get(&(family, protocol, port)).copied();
        assert_eq!(to(Family::V4, Protocol::Tcp, 80), Some(socket("203.0.113.25:80")));
        assert_eq!(to(Family::V4, Protocol::Tcp, 8080), Some(socket("203.0.113.26:80")));
        assert_eq!(to(Family::V4, Protocol::Udp, 53), Some(socket("203.0.113.25:53")));
        assert_eq!(to(Family::V4, Protocol::Sctp, 5000), Some(socket("203.0.113.26:5000")));
        assert_eq!(to(Family::V6, Protocol::Tcp, 8443), Some(socket("[2001:db8::1]:443")));
        assert_eq!(to(Family::V4, Protocol::Tcp, 8444), Some(socket("203.0.113.26:443")));
        assert_eq!(to(Family::V6, Protocol::Udp, 9001), Some(socket("[2001:db8::2]:9001")));
        assert_eq!(all.ports.len(), 9);
        let fallbacks: Vec<String> = all.fallback.values().map(IpAddr::to_string).collect();
        assert_eq!(fallbacks, ["203.0.113.27", "2001:db8::3"]);
    }

    #[test]
    fn what_is_invalid_is_quoted() {
        for (entries, says) in [
            (&["80 tcp"][..], "neither \"PORT PROTOCOL ADDRESS"),
            (&["80 tcp 203.0.113.25 80 80"], "neither"),
            (&["not-an-ip"], "no IP address"),
            (&["300.1.1.1"], "no IP address"),
            (&["010.1.2.3"], "no IP address"),
            (&["0.0.0.0"], "no host"),
            (&["80 udp 10.100.3.0/30"], "is a network"),
            (&["10.100.3.0/30"], "is a network"),
            (&["80 icmp 203.0.113.25"], "none of tcp, udp and sctp"),
            (&["http tcp 203.0.113.25"], "no port"),
            (&["-1 tcp 203.0.113.25"], "no port"),
            (&["+80 tcp 203.0.113.25"], "no port"),
            (&["0 tcp 203.0.113.25"], "no port"),
            (&["65536 tcp 203.0.113.25"], "no port"),
            (&["80 tcp 203.0.113.25 0"], "no port"),
            (&["80 tcp 203.0.113.25 99999"], "no port"),
            (&["80 tcp 203.0.113.25:0"], "port 0"),
            (&["80-70 tcp 203.0.113.25"], "above the last"),
            (&["80-90 tcp 203.0.113.25 80"], "same ports"),
            (&["80 tcp ::ffff:203.0.113.25"], "IPv4 address"),
            (&["80 tcp 203.0.113.25", "70-90 tcp 203.0.113.26"], "goes to 203.0.113.25:80 already"),
            (&["203.0.113.25", "80 tcp 203.0.113.26"], "comes last"),
            (&["203.0.113.25", "203.0.113.26"], "already does"),
            (&["1-65535 tcp 203.0.113.25", "1-65535 udp 203.0.113.25"], "more than 65536 ports"),
        ] {
            let why = redirects(entries).expect_err("invalid");
            assert!(why.contains(says), "{entries:?}: {why}");
        }
        assert!(redirects(&["80 tcp 203.0.113.25", "80 udp 203.0.113.25", "80 tcp 2001:db8::1"]).is_ok());
    }

    #[test]
    fn what_two_allow_is_what_both_do() {
        let allowed = |text: &str| Allowed::of(text).expect("valid").expect("no comment");
        assert_eq!(Allowed::of("# x"), Ok(None));
        for (one, another, both) in [
            ("203.0.113.0/24", "203.0.113.7 tcp 443", Some("203.0.113.7 tcp 443")),
            ("203.0.113.0/24 tcp", "203.0.113.7", Some("203.0.113.7 tcp")),
            ("203.0.113.0/24 tcp", "203.0.113.7 udp", None),
            ("203.0.113.0/24 tcp 400-500", "203.0.113.7 tcp 443-600", Some("203.0.113.7 tcp 443-500")),
            ("203.0.113.0/24 tcp 400-442", "203.0.113.7 tcp 443-600", None),
            ("2001:db8::/32", "203.0.113.7", None),
        ] {
            let both = both.map(allowed);
            assert_eq!(allowed(one).and(&allowed(another)), both, "{one}, {another}");
            assert_eq!(allowed(another).and(&allowed(one)), both, "{another}, {one}");
        }
        for text in ["203.0.113.0/33", "203.0.113.0/24 icmp", "203.0.113.0/24 tcp 0", "a b c d"] {
            assert!(Allowed::of(text).is_err(), "{text}");
        }
    }
}
