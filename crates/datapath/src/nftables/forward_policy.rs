//! Detects a CNI that enforces network policy in the host's FORWARD chain. Redirected packets bypass that chain, so such a
//! policy does not apply to selected pods' traffic to the outside (docs/security.md).
//!
//! Recognised by the chain names of such CNIs, in nf_tables, which current iptables uses too, and in the tables of
//! `iptables-legacy` (see `xtables`).

use std::io;

use rtnetlink::packet_core::{NLM_F_DUMP, NetlinkSerializable, NlasIterator};

use crate::netlink::{self, NETLINK_NETFILTER};
use crate::nftables::xtables;

/// Chains for policy on forwarded packets, and their CNI.
const CHAINS: [(&str, &str); 4] = [
    ("cali-FORWARD", "Calico"),
    ("filter-cali-FORWARD", "Calico"),
    ("KUBE-ROUTER-FORWARD", "kube-router"),
    ("WEAVE-NPC", "Weave Net"),
];

/// `struct nfgenmsg`: family, version, resource.
const GENERIC: usize = 4;
/// `NFTA_CHAIN_NAME`.
const NAME: u16 = 3;

/// The request for all chains: `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN`, of every family.
struct GetChains;

impl NetlinkSerializable for GetChains {
    fn message_type(&self) -> u16 {
        10 << 8 | 4
    }

    fn buffer_len(&self) -> usize {
        GENERIC
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.fill(0);
    }
}

/// The CNI with policy in FORWARD on this thread's host; `None` if none is known.
pub fn policy() -> io::Result<Option<&'static str>> {
    match in_nf_tables()? {
        None => xtables::find(whose),
        found => Ok(found),
    }
}

/// The CNI of a chain with this name.
fn whose(chain: &[u8]) -> Option<&'static str> {
    CHAINS.into_iter().find(|(name, _)| chain == name.as_bytes()).map(|(_, whose)| whose)
}

fn in_nf_tables() -> io::Result<Option<&'static str>> {
    match netlink::request(NETLINK_NETFILTER, NLM_F_DUMP, GetChains) {
        Ok(chains) => Ok(chains.iter().find_map(|chain| name(chain).and_then(whose))),
        // A kernel without nf_tables has no chains.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The name of a chain.
fn name(chain: &[u8]) -> Option<&[u8]> {
    let attributes = NlasIterator::new(chain.get(GENERIC..)?);
    let found = attributes.flatten().find(|attribute| attribute.kind() == NAME)?;
    found.into_inner().get(4..usize::from(found.length()))?.split(|byte| *byte == 0).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(name: &str) -> Vec<u8> {
        let attribute = |kind: u16, value: &[u8]| {
            let length = u16::try_from(4 + value.len()).expect("short");
            let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let name = [name.as_bytes(), &[0]].concat();
        [&[2, 0, 0, 0][..], &attribute(1, b"filter\0"), &attribute(NAME, &name)].concat()
    }

    #[test]
    fn a_chain_is_known_by_its_whole_name() {
        let policy_of = |text: &str| name(&chain(text)).and_then(whose);
        for other in ["FORWARD", "cali-FORWARD-not", "KUBE-FORWARD"] {
            assert_eq!(policy_of(other), None, "{other}");
        }
        assert_eq!(policy_of("cali-FORWARD"), Some("Calico"));
        let chain = chain("cali-FORWARD");
        for cut in 0..chain.len() {
            let _any = name(chain.get(..cut).expect("a part"));
        }
    }
}
