//! Idle timeouts. The defaults are those of the RFCs. A shorter timeout causes a warning, zero is refused.

use clap::Args;
use clap::builder::RangedU64ValueParser;
use egress_common::abi::Timeouts;
use tracing::warn;

const DEFAULT: Timeouts = Timeouts::DEFAULT;

/// From a second, below which an entry could go between two packets of a stream, to thirty days.
fn seconds() -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(1..=30 * 24 * 3600)
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Idle timeouts")]
pub struct TimeoutArgs {
    /// Seconds that an established TCP connection may be idle (1 to 2592000); RFC 5382 requires 7440 or more
    #[arg(long, env = "EGRESS_AGENT_TCP_ESTABLISHED_TIMEOUT", value_name = "SECONDS",
          default_value_t = DEFAULT.tcp_established, value_parser = seconds())]
    tcp_established_timeout: u32,
    /// Seconds that a TCP connection may wait to be answered (1 to 2592000); RFC 5382 requires 240 or more
    #[arg(long, env = "EGRESS_AGENT_TCP_OPENING_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.tcp_opening,
          value_parser = seconds())]
    tcp_opening_timeout: u32,
    /// Seconds that a TCP connection is kept after both sides have finished, or one has reset it (1 to 2592000); RFC 5382
    /// requires 240 or more
    #[arg(long, env = "EGRESS_AGENT_TCP_CLOSING_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.tcp_closing,
          value_parser = seconds())]
    tcp_closing_timeout: u32,
    /// Seconds between two datagrams of UDP (1 to 2592000); RFC 4787 requires 120 or more
    #[arg(long, env = "EGRESS_AGENT_UDP_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.udp,
          value_parser = seconds())]
    udp_timeout: u32,
    /// Seconds between two pings (1 to 2592000); RFC 5508 requires 60 or more
    #[arg(long, env = "EGRESS_AGENT_ICMP_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.icmp,
          value_parser = seconds())]
    icmp_timeout: u32,
    /// Seconds between two packets of any other protocol, such as SCTP (1 to 2592000)
    #[arg(long, env = "EGRESS_AGENT_OTHER_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.other,
          value_parser = seconds())]
    other_timeout: u32,
    /// Seconds that a flow of another protocol than TCP waits for its first answer (1 to 2592000), if its timeout is not shorter;
    /// Linux has 30
    #[arg(long, env = "EGRESS_AGENT_UNREPLIED_TIMEOUT", value_name = "SECONDS", default_value_t = DEFAULT.unreplied,
          value_parser = seconds())]
    unreplied_timeout: u32,
}

impl TimeoutArgs {
    /// The timeouts, with a warning for each that is shorter than its RFC requires.
    pub fn checked(&self) -> Timeouts {
        let timeouts = Timeouts {
            tcp_established: self.tcp_established_timeout,
            tcp_opening: self.tcp_opening_timeout,
            tcp_closing: self.tcp_closing_timeout,
            udp: self.udp_timeout,
            icmp: self.icmp_timeout,
            other: self.other_timeout,
            unreplied: self.unreplied_timeout,
        };
        for Short { flag, seconds, least, rfc } in short(&timeouts) {
            warn!("{flag}={seconds} is less than the {least} s of RFC {rfc}: connections that pause longer will break");
        }
        timeouts
    }
}

/// A timeout that is shorter than its RFC allows.
#[derive(Debug, PartialEq, Eq)]
struct Short {
    flag: &'static str,
    seconds: u32,
    least: u32,
    rfc: u32,
}

fn short(timeouts: &Timeouts) -> Vec<Short> {
    [
        ("--tcp-established-timeout", timeouts.tcp_established, 7440, 5382),
        ("--tcp-opening-timeout", timeouts.tcp_opening, 240, 5382),
        ("--tcp-closing-timeout", timeouts.tcp_closing, 240, 5382),
        ("--udp-timeout", timeouts.udp, 120, 4787),
        ("--icmp-timeout", timeouts.icmp, 60, 5508),
    ]
    .into_iter()
    .filter(|(_, seconds, least, _)| seconds < least)
    .map(|(flag, seconds, least, rfc)| Short { flag, seconds, least, rfc })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    fn parse(arguments: &[&str]) -> Result<Timeouts, clap::Error> {
        Ok(parse_flags::<TimeoutArgs>(arguments.iter().copied())?.checked())
    }

    #[test]
    fn the_defaults_are_those_of_the_rfcs() {
        let defaults = parse(&[]).expect("no flag is needed");
        assert_eq!((defaults, short(&defaults)), (Timeouts::DEFAULT, vec![]));
    }

    #[test]
    fn a_shorter_timeout_is_accepted_and_named() {
        let timeouts = parse(&["--udp-timeout=119", "--tcp-closing-timeout", "30"]).expect("seconds");
        let named: Vec<_> = short(&timeouts).iter().map(|short| (short.flag, short.seconds, short.least)).collect();
        assert_eq!(named, [("--tcp-closing-timeout", 30, 240), ("--udp-timeout", 119, 120)]);
    }

    #[test]
    fn zero_and_invalid_values_are_refused() {
        for bad in ["--udp-timeout=0", "--icmp-timeout=1m", "--tcp-opening-timeout=99999999"] {
            assert!(parse(&[bad]).is_err(), "{bad}");
        }
    }
}
