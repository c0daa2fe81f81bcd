//! Fragments: only the first one shows the ports, the others follow it by their identification.

use super::Tables;
use crate::abi::{FragKey, FragPorts};
use crate::wire::{Fragment, Heads, L4, PROTO_TCP, PROTO_UDP};

/// Remembers the ports of a first fragment, or gives a later one the ports of its first. A later fragment whose first one
/// has not been seen stays without, which decisions name [`crate::abi::Verdict::FragmentUnknown`].
#[inline(always)]
pub fn resolve<T: Tables>(heads: &mut Heads, tables: &T) {
    match heads.fragment {
        Fragment::Whole => {}
        Fragment::First => {
            let ports = FragPorts {
                sport: heads.tuple.sport().to_be_bytes(),
                dport: heads.tuple.dport().to_be_bytes(),
                reserved: [0; 4],
                seen_ns: tables.now_ns(),
            };
            tables.put_fragment(&key(heads), &ports);
        }
        Fragment::Later => {
            if let Some(ports) = tables.fragment(&key(heads)) {
                heads.tuple.set_ports(u16::from_be_bytes(ports.sport), u16::from_be_bytes(ports.dport));
                heads.l4 = match heads.tuple.protocol {
                    PROTO_UDP => L4::Udp,
                    PROTO_TCP => L4::Tcp,
                    // An echo message: requests and replies differ by direction only.
                    _ => L4::EchoRequest,
                };
            }
        }
    }
}

#[inline(always)]
fn key(heads: &Heads) -> FragKey {
    FragKey {
        saddr: heads.tuple.saddr,
        daddr: heads.tuple.daddr,
        id: heads.fragment_id,
        protocol: heads.tuple.protocol,
        reserved: [0; 3],
    }
}
