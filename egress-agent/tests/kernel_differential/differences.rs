//! The cases in which our NAT differs from netfilter, and why. The page `docs/nat-differences.md` is generated from this
//! list and from the results of the cases.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use crate::Differing;

/// A reason for differences, and its cases.
pub(crate) struct Difference {
    title: &'static str,
    reason: &'static str,
    /// Names of cases, with `*` as a wildcard; without a family in brackets it means both. Each must match a case, and
    /// each matched case must differ.
    cases: &'static [&'static str],
}

const DIFFERENCES: &[Difference] = &[
    Difference {
        title: "No host answers at the address",
        reason: "An egress IP is no address of the node. A packet that arrives for it and answers no flow is dropped \
                 without an answer (`no_nat_entry`, `icmp_unmatched`), so a scan learns nothing of the node. With \
                 netfilter the address is the node's own, and its stack answers.",
        cases: &[
            "unsolicited: ACK",
            "unsolicited: SYN",
            "unsolicited: SYN+ACK",
            "unsolicited: UDP",
            "unsolicited: echo request",
            "unsolicited: with the pod's port to the system port",
            "* unsolicited, from outside",
            "fragments: of an unknown flow, from outside",
            "TCP picked up in mid-stream, from outside",
            "TCP SYN+ACK from another host",
            "TCP SYN+ACK from another port",
            "TCP SYN+ACK to another port",
            "UDP answer from another host",
            "UDP answer from another port",
            "UDP answer to another port",
            "echo request from outside in the pod's flow",
        ],
    },
    Difference {
        title: "The ends check sequence numbers and states of TCP",
        reason: "Netfilter follows windows and states, treats what does not fit as invalid, and does not translate it; \
                 hosts then drop it. We translate by addresses and ports and leave the check to the two ends, which must \
                 make it anyway (RFC 5961). So a flow survives a change of its gateway, which no window does, and nothing \
                 is lost if netfilter guesses wrong. A segment with a wrong number reaches the pod and is refused there.",
        cases: &[
            "TCP ACK before the SYN was answered",
            "TCP FIN before the SYN was answered",
            "TCP RST from outside, out of the window",
            "TCP SYN from outside in the middle of a connection",
            "TCP SYN+FIN",
            "TCP SYN+RST",
            "TCP acknowledges what was never sent",
            "TCP all flags",
            "TCP begins with FIN",
            "TCP begins with RST",
            "TCP data from outside, out of the window",
            "TCP data from the pod, out of the window",
            "TCP no flags",
            "TCP no flags within a connection",
        ],
    },
    Difference {
        title: "Link-local destinations are left alone",
        reason: "They belong to the node and its link (question 3). Metadata services there expect the pod's or the node's \
                 address.",
        cases: &["from the pod to a link-local address (IPv4)"],
    },
    Difference {
        title: "Checksums are changed, not checked",
        reason: "A packet with a wrong checksum leaves with one that is equally wrong, and its receiver drops it; a check \
                 would read every byte. Netfilter reads them, treats the packet as invalid, and the host drops it.",
        cases: &[
            "malformed: * with a wrong checksum from the pod",
            "malformed: * with a wrong checksum to the pod",
            "malformed: wrong header checksum *",
            "malformed: echo of 12 bytes *",
            "SCTP with a wrong checksum *",
            "error about * whose own checksum is wrong",
        ],
    },
    Difference {
        title: "The receiver checks lengths",
        reason: "A packet that does not contradict the headers that we read passes unchanged, with padding and missing \
                 ends; nothing is read or written outside of the packet. Netfilter's host trims padding and drops a packet \
                 that is shorter than it says.",
        cases: &[
            "malformed: * longer than its length says",
            "malformed: UDP *shorter than its length says",
            "malformed: echo *shorter than its length says",
            "malformed: TCP whose header *",
            "malformed: UDP of 12 bytes *",
            "malformed: UDP whose length *",
            "malformed: total length *",
            "error about TCP that quotes 4 bytes",
            "error about UDP that quotes 4 bytes",
        ],
    },
    Difference {
        title: "IPv4 options and hop-by-hop options are carried, not obeyed",
        reason: "They are kept unchanged, except source routes, which are dropped (`source_routed`). A router records its \
                 route and time, and answers options that it cannot read.",
        cases: &[
            "* with a record route option",
            "* with a timestamp option",
            "* with an option that is too long",
            "* with an unknown hop-by-hop option to be refused",
        ],
    },
    Difference {
        title: "Up to six extension headers are read",
        reason: "A longer chain is dropped (`chain_too_long`): a program needs a bound, and no host sends such chains.",
        cases: &["* with seven extension headers"],
    },
    Difference {
        title: "Fragments are translated one by one",
        reason: "Netfilter holds fragments until the datagram is whole. We translate each as it comes, and hold only those \
                 that come before the first one, which has the ports. An incomplete or overlapping datagram passes \
                 unchanged, and its receiver judges; DF is kept.",
        cases: &["fragments of * without the last", "fragments: overlapping", "fragments: with DF set"],
    },
    Difference {
        title: "The source and the quote of errors about packets that are too long",
        reason: "The program answers by itself: a pod from the node's address, a sender outside from the egress IP, as \
                 netfilter does. It quotes the network header and 20 bytes after it, which is all that path MTU discovery \
                 needs; a kernel quotes up to 576 or 1280 bytes.",
        cases: &[
            "UDP for the pod that is *too long",
            "TCP for the pod that is *too long",
            "echo for the pod that is *too long",
            "UDP to a narrow path that is *too long",
            "TCP to a narrow path that is *too long",
            "echo to a narrow path that is *too long",
            "offload: TCP segments too long *",
            "offload: checksum of an oversize datagram",
        ],
    },
    Difference {
        title: "A pod gets an ICMP error instead of fragmentation",
        reason: "An IPv4 packet that may be fragmented and is too long for the path out is refused with an ICMP error to \
                 the pod: its next packets have the right size. A packet that is too long for the path to the pod is \
                 fragmented.",
        cases: &[
            "UDP that may be fragmented to a narrow path that is *too long (IPv4)",
            "offload: checksum of a datagram that is fragmented for the path (IPv4)",
        ],
    },
    Difference {
        title: "Time Exceeded to the outside has the node's address",
        reason: "The node's stack answers a reply whose TTL has run out, before anything of it was changed; so \
                 `traceroute` towards an egress IP shows the node. Netfilter gives its answer the egress IP.",
        cases: &["0 hops left, to the pod", "1 hops left, to the pod"],
    },
    Difference {
        title: "The pod's own address is not protected",
        reason: "A packet for a pod's own address from outside is left alone. Netfilter knows its ports from the pod's \
                 flow and changes the sender's port to tell both apart.",
        cases: &["unsolicited: to the pod's own address, in its flow"],
    },
    Difference {
        title: "What cannot be translated is not sent",
        reason: "AH authenticates the addresses (RFC 3715), so its receiver refuses what a NAT has changed; node \
                 information queries have no identifier by which an answer finds its pod; information and address mask \
                 queries are historic (RFC 6918). All are dropped (`unsupported_protocol`). So are DCCP and UDP-Lite, \
                 which this kernel's netfilter does not know: it changes the address alone, and their receivers drop the \
                 packet for its wrong checksum.",
        cases: &[
            "AH both ways (IPv4)",
            "AH from two pods to one server (IPv4)",
            "* with an authentication header",
            "ICMP query: node information",
            "ICMP query: information",
            "ICMP query: address mask",
        ],
    },
    Difference {
        title: "The ends check states of SCTP",
        reason: "As for TCP: an association survives a change of its gateway. It is picked up with the pod's own port only.",
        cases: &["SCTP abort from the server", "SCTP picked up in mid-stream"],
    },
    Difference {
        title: "SCTP may have no checksum",
        reason: "Zero means none, if both ends have agreed to that (RFC 9653), and stays. Netfilter treats it as wrong.",
        cases: &["SCTP whose checksum is zero", "SCTP with another port: whose checksum is zero"],
    },
    Difference {
        title: "Source routes are refused",
        reason: "A packet that visits other addresses after its destination is dropped (`source_routed`): the decision \
                 here was made for the visible address.",
        cases: &["* with a routing header with segments left"],
    },
    Difference {
        title: "Errors of unknown types",
        reason: "ICMPv6 types below 128 without a documented meaning are dropped (`unsupported_protocol`).",
        cases: &["error 5/0 about * (IPv6)", "error 100/0 about * (IPv6)"],
    },
];

/// Every listed case, with the index of its reason. Panics if an entry matches no case.
pub(crate) fn listed(names: &[String]) -> BTreeMap<String, usize> {
    let mut listed = BTreeMap::new();
    for (place, difference) in DIFFERENCES.iter().enumerate() {
        for pattern in difference.cases {
            let mut named = names.iter().filter(|name| is_named(pattern, name)).peekable();
            assert!(named.peek().is_some(), "listed as differing, and there is no such case: {pattern}");
            for name in named {
                let twice = listed.insert(name.clone(), place);
                assert_eq!(twice, None, "{name} is listed twice, also by {pattern}");
            }
        }
    }
    listed
}

fn is_named(pattern: &str, name: &str) -> bool {
    if pattern.ends_with(')') {
        return fits(pattern, name);
    }
    let bare = name.strip_suffix(" (IPv4)").or_else(|| name.strip_suffix(" (IPv6)"));
    bare.is_some_and(|bare| fits(pattern, bare))
}

/// Whether the text matches the pattern, with `*` as a wildcard.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(start) else { return false };
    text.char_indices().map(|(at, _)| at).chain([text.len()]).any(|at| fits(rest, &text[at..]))
}

const BEGIN: &str = "<!-- generated: differences -->\n";
const END: &str = "<!-- end: differences -->";

/// Compares the page with the results; with `DIFFERENTIAL_WRITE` in the environment, writes it.
pub(crate) fn check_page(differing: &Differing, listed: &BTreeMap<String, usize>) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/nat-differences.md");
    let page = std::fs::read_to_string(&path).expect("read docs/nat-differences.md");
    let (before, rest) = page.split_once(BEGIN).expect("the page has a generated part");
    let (_, after) = rest.split_once(END).expect("the generated part ends");
    let wanted = format!("{before}{BEGIN}{}{END}{after}", render(differing, listed));
    if std::env::var_os("DIFFERENTIAL_WRITE").is_some() {
        std::fs::write(&path, wanted).expect("write docs/nat-differences.md");
        return;
    }
    let line = page.lines().zip(wanted.lines()).find(|(is, wanted)| is != wanted);
    assert!(
        page == wanted,
        "docs/nat-differences.md does not match the results (run this test with DIFFERENTIAL_WRITE=1): {line:?}"
    );
}

fn render(differing: &Differing, listed: &BTreeMap<String, usize>) -> String {
    let mut text = String::new();
    for (place, difference) in DIFFERENCES.iter().enumerate() {
        let Difference { title, reason, .. } = difference;
        write!(text, "\n### {title}\n\n{reason}\n\n| case | netfilter | we |\n|---|---|---|\n")
            .expect("a string takes all");
        for (name, (netfilter, ours)) in differing.iter().filter(|(name, _)| listed.get(*name) == Some(&place)) {
            writeln!(text, "| {name} | {netfilter} | {ours} |").expect("a string takes all");
        }
    }
    text.push('\n');
    text
}
