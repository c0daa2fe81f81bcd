//! Argument types of several commands: pod, destination, protocol.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use egress_common::wire::{PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodName {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl FromStr for PodName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err("a pod is named NAMESPACE/NAME"),
        }
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) address: IpAddr,
    pub(super) port: Option<u16>,
}

impl FromStr for Destination {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(with) = text.parse::<SocketAddr>() {
            return Ok(Self { address: with.ip(), port: Some(with.port()) });
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let address = bare.parse().map_err(|_| "it must be ADDRESS or ADDRESS:PORT, and of IPv6 [ADDRESS]:PORT")?;
        Ok(Self { address, port: None })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Protocol(pub(super) u8);

impl FromStr for Protocol {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(match text {
            "tcp" => PROTO_TCP,
            "udp" => PROTO_UDP,
            "icmp" => PROTO_ICMP,
            "icmpv6" => PROTO_ICMPV6,
            "sctp" => PROTO_SCTP,
            number => number.parse().map_err(|_| "it must be tcp, udp, icmp, sctp or a number of 0 to 255")?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_have_a_port_or_none() {
        for (text, address, port) in [
            ("198.51.100.10", "198.51.100.10", None),
            ("198.51.100.10:80", "198.51.100.10", Some(80)),
            ("2001:db8::1", "2001:db8::1", None),
            ("[2001:db8::1]", "2001:db8::1", None),
            ("[2001:db8::1]:80", "2001:db8::1", Some(80)),
        ] {
            let address = address.parse().expect("a literal");
            assert_eq!(text.parse(), Ok(Destination { address, port }), "{text}");
        }
        for text in ["", "world", "198.51.100.10:", "198.51.100.10:65536", "198.51.100.0/24"] {
            assert!(text.parse::<Destination>().is_err(), "{text}");
        }
    }

    #[test]
    fn protocols_have_names_and_numbers() {
        assert_eq!(["tcp", "udp", "sctp", "47"].map(str::parse), [6, 17, 132, 47].map(|number| Ok(Protocol(number))));
        assert!(["TCPs", "256", "-1", ""].iter().all(|text| text.parse::<Protocol>().is_err()));
    }
}
