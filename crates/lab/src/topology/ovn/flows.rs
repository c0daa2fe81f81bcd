//! The flows of `breth0`, as ovnkube-node writes them for the default network in local gateway mode with its own EgressIP off.
//! Pure text for `ovs-ofctl`.
//!
//! Connections of OVN and of the host share the node's address: table 0 remembers in zone 64000 whose each one is, table 1 takes
//! answers to their owner. Tables 2 to 5 lead the host to cluster IPs.

use super::super::addresses::{self as plan, NodeNumber};
use super::logical::nic_address;

/// What the lines of a family differ in.
struct FamilyWords {
    ip: &'static str,
    udp: &'static str,
    source: &'static str,
    destination: &'static str,
    services: &'static str,
    own: String,
    /// OVN's and the host's address for each other.
    masquerade: [&'static str; 2],
}

pub(super) fn breth0(number: NodeNumber, phys: &str, patch: &str) -> String {
    let own = number.address();
    let hw = nic_address(number);
    let families = [
        FamilyWords {
            ip: "ip",
            udp: "udp",
            source: "nw_src",
            destination: "nw_dst",
            services: plan::SERVICES_V4,
            own: own.v4.to_string(),
            masquerade: ["169.254.0.1", "169.254.0.2"],
        },
        FamilyWords {
            ip: "ipv6",
            udp: "udp6",
            source: "ipv6_src",
            destination: "ipv6_dst",
            services: plan::SERVICES_V6,
            own: own.v6.to_string(),
            masquerade: ["fd69::1", "fd69::2"],
        },
    ];
    let mut flows: String = families.iter().map(|family| of_family(family, &hw, phys, patch)).collect();
    flows += &format!(
        "table=0,priority=10,in_port={phys},dl_dst={hw},actions=output:LOCAL,output:{patch}
table=0,priority=10,in_port={patch},dl_src={hw},actions=NORMAL
table=0,priority=9,in_port={patch},actions=drop
table=0,priority=0,actions=NORMAL
table=1,priority=14,icmp6,icmpv6_type=134,actions=FLOOD
table=1,priority=14,icmp6,icmpv6_type=136,actions=FLOOD
table=1,priority=13,udp,in_port={phys},tp_dst=3784,actions=output:{patch},output:LOCAL
table=1,priority=13,udp6,in_port={phys},tp_dst=3784,actions=output:{patch},output:LOCAL
table=1,priority=10,dl_dst={hw},actions=output:LOCAL
table=1,priority=0,actions=NORMAL
table=2,priority=100,actions=set_field:{hw}->eth_dst,output:{patch}
table=3,actions=move:NXM_OF_ETH_DST[]->NXM_OF_ETH_SRC[],set_field:{hw}->eth_dst,output:LOCAL
table=11,priority=10,reg0=0x1,actions=output:LOCAL
table=11,priority=1,actions=output:{patch}
"
    );
    flows
}

fn of_family(family: &FamilyWords, hw: &str, phys: &str, patch: &str) -> String {
    let FamilyWords { ip, udp, source, destination, services, own, masquerade: [by_ovn, by_host] } = family;
    let mine = format!("in_port={patch},dl_src={hw},{ip}");
    let larger = "check_pkt_larger(1414)->reg0[0],resubmit(,11)";
    format!(
        "table=0,priority=205,in_port={phys},dl_dst={hw},{udp},udp_dst=6081,actions=output:LOCAL
table=0,priority=200,in_port={phys},{udp},udp_dst=6081,actions=NORMAL
table=0,priority=200,in_port=LOCAL,{udp},udp_dst=6081,actions=output:{phys}
table=0,priority=500,in_port={patch},{ip},{destination}={by_host},{source}={own},actions=ct(commit,zone=64001,nat(dst={own}),table=4)
table=0,priority=500,in_port=LOCAL,{ip},{destination}={by_ovn},actions=ct(zone=64002,nat,table=5)
table=0,priority=500,in_port=LOCAL,{ip},{destination}={services},actions=ct(commit,zone=64001,nat(src={by_host}),table=2)
table=0,priority=500,in_port={patch},{ip},{source}={services},{destination}={by_host},actions=ct(zone=64001,nat,table=3)
table=0,priority=105,in_port={patch},{ip},{destination}={services},actions=drop
table=0,priority=105,{mine},pkt_mark=0x3f0,actions=ct(commit,zone=64000,nat(src={own}),exec(set_field:0x1->ct_mark)),output:{phys}
table=0,priority=100,{mine},actions=ct(commit,zone=64000,exec(set_field:0x1->ct_mark)),output:{phys}
table=0,priority=100,in_port=LOCAL,{ip},actions=ct(commit,zone=64000,exec(set_field:0x2->ct_mark)),output:{phys}
table=0,priority=50,in_port={phys},{ip},actions=ct(zone=64000,nat,table=1)
table=1,priority=100,{ip},ct_state=+trk+est,ct_mark=0x1,actions={larger}
table=1,priority=100,{ip},ct_state=+trk+rel,ct_mark=0x1,actions={larger}
table=1,priority=100,{ip},ct_state=+trk+est,ct_mark=0x2,actions=output:LOCAL
table=1,priority=100,{ip},ct_state=+trk+rel,ct_mark=0x2,actions=output:LOCAL
table=4,{ip},actions=ct(commit,zone=64002,nat(src={by_ovn}),table=3)
table=5,{ip},actions=ct(commit,zone=64001,nat,table=2)
"
    )
}
