//! The mutations of the programs: what is broken, where, and what would be lost if no test saw it.
//!
//! Each changes one thing and leaves programs that the verifier takes. The text must be in its file exactly once; a test
//! of this module holds the table to the sources.

use clap::ValueEnum;

use super::agent;

/// One way to break them.
#[derive(Debug)]
pub(super) struct Mutation {
    pub(super) name: &'static str,
    /// Below the clone.
    pub(super) file: &'static str,
    /// In the file exactly once.
    pub(super) find: &'static str,
    pub(super) replace: &'static str,
    /// What it would mean on a node.
    pub(super) why: &'static str,
    /// The tests that should notice, by parts of their names: of the agent those of its library, else those on the kernel; of
    /// egress-common its own tests are asked first.
    pub(super) tests: &'static [&'static str],
}

impl Mutation {
    /// Whether the crate that is broken has tests on the host.
    pub(super) fn is_pure(&self) -> bool {
        self.file.starts_with("egress-common/")
    }

    pub(super) fn part(&self) -> MutatedPart {
        if self.file.starts_with("egress-agent/") || self.file.starts_with("crates/") {
            MutatedPart::Agent
        } else {
            MutatedPart::Programs
        }
    }
}

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum MutatedPart {
    /// The eBPF programs, which tests on the kernel run.
    Programs,
    /// The agent's user space, which tests of its own run.
    Agent,
}

/// All mutations.
pub(super) fn all() -> impl Iterator<Item = &'static Mutation> {
    PROGRAMS.iter().chain(agent::AGENT)
}

const FIB: &str = "egress-ebpf/src/fib.rs";
const FLOW_CACHE: &str = "egress-ebpf/src/flow_cache.rs";
const FRAGMENT: &str = "egress-ebpf/src/fragment.rs";
const PROGRAM_FROM_NETDEV: &str = "egress-ebpf/src/from_netdev.rs";
const ICMP: &str = "egress-ebpf/src/icmp.rs";
const PROGRAM_NAT: &str = "egress-ebpf/src/nat.rs";
const PROGRAM_OVERLAY: &str = "egress-ebpf/src/overlay.rs";
const PROGRAM_PACE: &str = "egress-ebpf/src/pace.rs";
const LEASE: &str = "egress-ebpf/src/lease.rs";
const MAIN: &str = "egress-ebpf/src/main.rs";
const MAPS: &str = "egress-ebpf/src/maps.rs";
const NAT: &str = "egress-ebpf/src/nat.rs";
const REWRITE: &str = "egress-ebpf/src/rewrite.rs";
const EXPIRE: &str = "egress-ebpf/src/expiry.rs";
const PROGRAM_TO_NETDEV: &str = "egress-ebpf/src/to_netdev.rs";
const CONFIG: &str = "egress-common/src/abi/config.rs";
const FLOWS: &str = "egress-common/src/abi/flows.rs";
const WIRE: &str = "egress-common/src/wire/mod.rs";
const CRC32C: &str = "egress-common/src/wire/crc32c.rs";
const DECIDE: &str = "egress-common/src/decide/mod.rs";
const ROUTES: &str = "egress-common/src/decide/routes.rs";
const FROM_OVERLAY: &str = "egress-common/src/decide/from_overlay.rs";
const FROM_NETDEV: &str = "egress-common/src/decide/from_netdev.rs";
const EXPIRY: &str = "egress-common/src/decide/expiry.rs";
const FRAGMENTS: &str = "egress-common/src/decide/fragments.rs";
const LEASE_ABI: &str = "egress-common/src/abi/lease.rs";
const TO_NETDEV: &str = "egress-common/src/decide/to_netdev.rs";
const PACE: &str = "egress-common/src/decide/pace.rs";
const RESET: &str = "egress-common/src/wire/reset.rs";
const LIMIT: &str = "egress-common/src/decide/limit.rs";
const MTU: &str = "egress-common/src/decide/mtu.rs";
const SLOTS: &str = "egress-common/src/decide/slots.rs";
const SNAT: &str = "egress-common/src/decide/snat.rs";
const SNAT_BLOCKS: &str = "egress-common/src/decide/snat/blocks.rs";
const FROM_POD: &str = "egress-common/src/decide/from_pod.rs";

macro_rules! mutations {
    ($table:ident, $($name:literal, $file:ident, [$($test:literal),+], $why:literal: $find:literal => $replace:literal;)+) => {
        pub(super) const $table: &[Mutation] = &[
            $(Mutation { name: $name, file: $file, find: $find, replace: $replace, why: $why, tests: &[$($test),+] },)+
        ];
    };
}
pub(super) use mutations;

mutations! { PROGRAMS,
    // The lease, on every path that emits or claims.
    "snat-without-a-lease", SNAT, ["lease::"], "programs without an agent emit what another node serves":
        "owner.origin != Origin::Stack && !tables.has_lease()" => "owner.origin != Origin::Stack && tables.decisions() == u32::MAX";
    "answers-without-a-lease", PROGRAM_FROM_NETDEV, ["lease::"], "neighbours learn the link address of a node that has lost the address":
        "    if !Maps.has_lease() {\n        return None;\n    }\n" => "";
    "errors-without-a-lease", ICMP, ["lease::"], "errors leave from an address of another node":
        "    if !Maps.has_lease() {\n        return Outcome::done(Verdict::LeaseExpired);\n    }\n" => "";
    "flow-cache-outlives-the-lease", FLOW_CACHE, ["lease::"], "flows go on for an eighth of a second":
        "cached.until_ns = cached.until_ns.min(run_ns().saturating_add(lease::left_ns()));" => "";
    "late-packets-leave", PROGRAM_TO_NETDEV, ["lease::"], "what has waited for its neighbour leaves from an address of another node":
        "(false, _) => Verdict::LeaseExpired," => "(false, _) => Verdict::NotOurs,";
    "late-packets-of-a-moved-address-leave", PROGRAM_TO_NETDEV, ["lease::"], "likewise, where the node has a lease again":
        "(true, None) => Verdict::NotGateway," => "(true, None) => Verdict::NotOurs,";
    "late-packets-leave-by-any-interface", PROGRAM_TO_NETDEV, ["interfaces::"], "what has waited leaves to a network that does not have its address":
        "(true, Some(owned)) if owned.is_elsewhere(packet.ifindex()) => Verdict::WrongInterface," => "";
    // An egress IP belongs to one interface.
    "arp-on-every-interface", PROGRAM_FROM_NETDEV, ["neighbours::"], "neighbours of another interface learn its link address (ARP flux)":
        "    if owned.ifindex != packet.ifindex() {\n        return Outcome::done(Verdict::WrongInterface);\n    }\n" => "";
    "claims-on-every-interface", PROGRAM_FROM_NETDEV, ["neighbours::"], "a host of another network that has the same address is reported":
        "owned.ifindex == packet.ifindex() && owned.mac" => "owned.mac";
    "egress-ip-by-every-interface", FROM_NETDEV, ["interfaces::"], "a forged answer reaches a pod by another network":
        "        if owned.is_elsewhere(ifindex) {\n            return FromNetdev::Done(Verdict::WrongInterface);\n        }\n" => "";
    "shared-address-is-answered", PROGRAM_FROM_NETDEV, ["neighbours::"], "this node answers for a Service's address beside the Service's provider":
        "(held.address == *target && !held.is_shared())" => "(held.address == *target)";
    "shared-address-drops-clients", FROM_NETDEV, ["shared_addresses::"], "the Service's clients do not reach it":
        "return if owned.is_shared() { or_left_alone(decision) } else { decision };" => "return decision;";
    // Addresses of the host.
    "hosts-ports-are-taken", SNAT, ["host_addresses::"], "replies to the host's sockets go to pods":
        "if is_nodes { config.node_ports } else { EGRESS_PORTS }" => "if is_nodes { EGRESS_PORTS } else { EGRESS_PORTS }";
    "hosts-tunnels-are-taken", SNAT, ["host_addresses::"], "a tunnel of the host ends at a pod":
        "(pool.is_nodes || headers.l4 != L4::Other)" => "(owner.origin == Origin::Stack || headers.l4 != L4::Other)";
    "no-port-is-left-to-nat", SNAT, ["host_addresses::"], "flows get port 0":
        "if pool.ports.first == 0 {" => "if pool.ports.first == 1 {";
    "marked-replies-at-an-egress-ip-are-lost", FROM_NETDEV, ["host_addresses::"], "pods do not reach other nodes by that address":
        "if owned.is_hosts() { decision } else { without_nodes(decision) }" => "without_nodes(decision)";
    "a-lost-address-is-used", MAPS, ["host_addresses::"], "pods send with an address that another host has by now":
        "(copy.is_of(egress_id) && copy.is_usable())" => "copy.is_of(egress_id)";
    "recent-by-any-interface", FLOW_CACHE, ["flow_cache::"], "likewise, for as long as the flow cache serves its flow":
        "let is_expected_here = || packet.ifindex() == u32::from(cached.came_by);" => "let is_expected_here = || true;";
    "guard-of-another-interface-skipped", TO_NETDEV, ["interfaces::"], "an egress IP leaves by an interface whose network does not have it":
        "is_some_and(|owned| owned.is_elsewhere(meta.ifindex))" => "is_some_and(|owned| owned.ifindex == 0)";
    // Further egress interfaces.
    "heartbeat-of-every-interface", PROGRAM_FROM_NETDEV, ["lease::"], "a node that is isolated on its uplink keeps its lease by another network":
        "    if is_uplink(packet, config) {\n        lease::heartbeat();\n    }" => "    let _ = config;\n    lease::heartbeat();";
    "overlay-by-every-interface", PROGRAM_FROM_NETDEV, ["encapsulation::"], "a host of another network speaks for a node":
        "is_uplink(packet, config) && overlay::is_for_us" => "overlay::is_for_us";
    "mark-gets-the-uplinks-address", TO_NETDEV, ["from_netdev::"], "a packet leaves with an address of another network":
        "    if ifindex == config.uplink_ifindex {\n" => "    if ifindex != 0 {\n";
    "further-interfaces-ask-the-kernel", NAT, ["further_routes::"], "IPv6 packets find no route, or need forwarding":
        "owned.is_shared() || owned.ifindex == run.config.uplink_ifindex {\n" => "owned.ifindex != 0 {\n";
    "shared-address-by-its-interface-alone", NAT, ["host_routes::"], "the network of an EgressService is not used":
        "true => (run.config.mgmt_ifindex, RouteChoice::Hosts)," => "true => (owned.ifindex, RouteChoice::Through),";
    "shared-address-by-any-device", FIB, ["host_routes::"], "packets leave by a device without programs, and replies are not translated":
        " || Maps.interface(params.ifindex).is_some()," => " || params.ifindex != 0,";
    "mtu-of-the-uplink-for-every-interface", FIB, ["host_routes::"], "packets of a Service are too long for another interface":
        "RouteChoice::Hosts => mtu.max(LEAST_MTU)," => "RouteChoice::Hosts => lookup.device_mtu,";
    "refused-route-is-on-link", ROUTES, ["further_routes::", "routes::"], "a blackhole of the administrator lets packets leave":
        "RouteKind::Refused => None," => "RouteKind::Refused => Some(&flow.daddr),";
    "hop-by-the-slots-hash", ROUTES, ["routes::"], "each of two addresses always has the same next hop":
        "slots::pick(flow, HOPS, entry.count())" => "slots::pick(flow, 0, entry.count())";
    "torn-neighbour-is-used", MAPS, ["further_routes::"], "packets go to the link address of another neighbour":
        "entry.is_of(key).then_some(entry.mac)" => "Some(entry.mac)";
    "route-mtu-ignored", FIB, ["further_routes::"], "packets that the path does not take are lost":
        "if entry.mtu == 0 { lookup.device_mtu } else { entry.mtu.min(lookup.device_mtu) }" => "lookup.device_mtu";
    "a-gap-is-no-end", LEASE_ABI, ["lease::"], "a machine that stood still serves what another node serves by now":
        "self.is_bounded() && now_ns.saturating_sub(self.heartbeat_ns) > self.stall_ns" => "self.is_bounded() && now_ns == u64::MAX";
    "a-gap-ends-an-endless-lease", LEASE_ABI, ["lease::"], "a cluster with one gateway loses egress on a quiet network":
        "self.is_bounded() && now_ns" => "now_ns";
    "a-gap-is-forgotten", LEASE, ["lease::"], "the agent renews what it held before the machine stood still":
        "        swap(deadline, until_ns, Lease::EXPIRED.until_ns);\n" => "";
    "a-heartbeat-hides-a-gap", LEASE, ["lease::"], "what comes after the first frame of a machine that stood still is served":
        "    if left(lease, now) > 0 {" => "    if now > 0 {";
    "no-heartbeat", MAIN, ["lease::"], "an agent's death ends egress after the timeout, without its grace":
        "        from_netdev::note_heartbeat(packet, config);\n" => "        let _ = packet;\n";
    // What a program returns.
    "drop-passes", MAIN, ["to_netdev::"], "a packet that must not leave is left to the stack":
        "verdict, length);\n                TC_ACT_SHOT" => "verdict, length);\n                TC_ACT_UNSPEC";
    "pass-ends-the-chain", MAIN, ["to_netdev::"], "TC_ACT_OK hides packets from programs behind ours":
        "Class::Pass => TC_ACT_UNSPEC," => "Class::Pass => 0,";
    "verdict-dropped", MAIN, ["to_netdev::"], "whatever was decided, the stack gets the packet":
        "    outcome.finish(packet, length)\n" => "    outcome.finish(packet, length);\n    TC_ACT_UNSPEC\n";
    "unready-overlay-passes", MAIN, ["from_overlay::"], "before the configuration is there, the stack forwards overlay packets with pods' addresses":
        "run(&ctx, Verdict::NotReady, |_, _| FastCheck::Undecided, from_overlay::begin" => "run(&ctx, Verdict::NotConfigured, |_, _| FastCheck::Undecided, from_overlay::begin";

    // Where things stand in a packet.
    "ipv4-addresses-swapped", WIRE, ["replies::"], "the wrong end is rewritten":
        "SADDR: usize = 12;\n    pub const DADDR: usize = 16;" => "SADDR: usize = 16;\n    pub const DADDR: usize = 12;";
    "ipv6-addresses-swapped", WIRE, ["replies::"], "the wrong end is read and rewritten":
        "SADDR: usize = 8;\n    pub const DADDR: usize = 24;" => "SADDR: usize = 24;\n    pub const DADDR: usize = 8;";
    "ports-swapped", WIRE, ["replies::"], "the wrong port is rewritten":
        "SPORT: usize = 0;\n    pub const DPORT: usize = 2;" => "SPORT: usize = 2;\n    pub const DPORT: usize = 0;";
    "port-byte-order", REWRITE, ["replies::"], "the reply arrives at an unclaimed port":
        "+ port_at, new.to_be_bytes())" => "+ port_at, new.to_le_bytes())";

    // Checksums.
    "ipv4-header-checksum", REWRITE, ["replies::"], "the next router drops the packet":
        "let sum = csum::replace_u32(sum, old.words()[3], new.words()[3]);" =>
        "let sum = csum::replace_u32(sum, old.words()[3], old.words()[3]);";
    "pseudo-header-checksum", REWRITE, ["replies::"], "the receiver drops TCP and UDP":
        "replace_checksum(*self, headers, &old, &rewrite.addr)?;\n        if" =>
        "replace_checksum(*self, headers, &old, &old)?;\n        if";
    "icmpv6-checksum", REWRITE, ["replies::"], "the receiver drops ICMPv6, which unlike ICMP covers the addresses":
        "PROTO_ICMPV6 => Some((l4::ICMP_CHECKSUM, 0))," => "PROTO_ICMPV6 => None,";
    "port-checksum", REWRITE, ["replies::"], "the receiver drops what got another port":
        "let (from, to) = (old.to_be(), new.to_be());" => "let (from, to) = (old.to_be(), old.to_be());";
    "udp-zero-checksum", REWRITE, ["replies::", "protocols::"], "a checksum that says none becomes a wrong one":
        "PROTO_UDP => Some((l4::UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)))," =>
        "PROTO_UDP => Some((l4::UDP_CHECKSUM, 0)),";
    "complete-sum", REWRITE, ["protocols::"], "a device's sum over an IPv6 packet is wrong, and the receiver sums it again":
        "packet.update_complete_sum(change.into());" => "packet.update_complete_sum(0);";
    "sctp-checksum", REWRITE, ["sctp::"], "the receiver drops what got another port":
        "sctp_checksum(u32::from_le_bytes(field), difference, length)" =>
        "sctp_checksum(u32::from_le_bytes(field), 0, length)";
    "sctp-length-of-the-frame", REWRITE, ["sctp::"], "the receiver drops what the link has padded":
        "headers.message_length(&packet, L3)?" => "packet.len() as u32 - at as u32";
    "sctp-quoted-checksum", REWRITE, ["icmp_errors::"], "an error that reaches the pod quotes a packet that it never sent":
        "replaced(field, old, new, length)" => "replaced(field, old, old, length)";
    "sctp-zero-checksum", CRC32C, ["sctp::"], "a checksum that is left to a device becomes a wrong one":
        "if field == 0 { 0 } else" => "if field == u32::MAX { 0 } else";
    "sctp-fragment-passes", DECIDE, ["sctp::"], "a fragment leaves with a checksum that is wrong for the whole":
        "headers.l4 == L4::Sctp && headers.fragment == Fragment::First" =>
        "headers.l4 == L4::Sctp && headers.fragment == Fragment::Later";
    "ttl-stays", REWRITE, ["replies::"], "packets go round for ever":
        "([ttl, protocol], [ttl.wrapping_sub(1), protocol])" => "([ttl, protocol], [ttl, protocol])";
    "hop-limit-stays", REWRITE, ["replies::"], "packets go round for ever":
        "[headers.ttl.wrapping_sub(1)]" => "[headers.ttl]";

    // Mappings.
    "keys-mixed", SNAT, ["replies::"], "the forward key is claimed as the reverse one":
        "tables.claim_nat(forward, &reverse, owner)" => "tables.claim_nat(&reverse, forward, owner)";
    "reverse-restores-the-peer", DECIDE, ["replies::"], "answers go to the world's own address":
        "addr: forward.saddr, port: forward.sport()" => "addr: forward.daddr, port: forward.dport()";
    "snat-shows-the-peer", DECIDE, ["replies::"], "packets leave with a source that is not ours":
        "addr: reverse.daddr, port: reverse.dport()" => "addr: reverse.saddr, port: reverse.sport()";
    "claim-overwrites", NAT, ["expiry::an_entry_under_removal", "limits::"], "a second flow takes the port of the first":
        "claimed(NAT.insert(key, made, BPF_NOEXIST.into()))" => "claimed(NAT.insert(key, made, 0))";
    "flow-claim-overwrites", MAPS, ["expiry::an_entry_under_removal"], "of two CPUs that begin one flow both win, with different addresses":
        "claimed(FLOWS.insert(tuple, flow, BPF_NOEXIST.into()))" => "claimed(FLOWS.insert(tuple, flow, 0))";
    "retire-leaves-the-reverse-key", SNAT, ["expiry::", "from_pod::"], "answers to an address that was taken away still come in":
        "if is_whole && tables.forget_nat(&reverse) {" => "if is_whole {";
    "retire-leaves-the-forward-key", SNAT, ["expiry::", "from_pod::"], "a flow whose address has changed is dropped for ever":
        "        tables.forget_nat(forward);\n" => "";
    "former-node-answered", SNAT, ["from_overlay::"], "answers go to a node that the flow no longer comes from":
        "        && nat_entry.source_node == owner.source_node\n" => "";
    "stride-shares-a-factor", SNAT, ["limits::"], "half of the ports are never tried":
        "stride = prime;" => "stride = 2;";
    "system-ports-kept", SNAT, ["replies::"], "NAT gives ports below 1024":
        "PortRange { first: 1024," => "PortRange { first: 1,";
    "mid-stream-port-changes", SNAT, ["expiry::", "from_pod::"], "a running connection goes on from a port that its peer does not know":
        "OwnPort::Taken if is_under_way(headers) => return" => "OwnPort::Taken if forward.sport() == 0 => return";
    "owned-address-not-compared", NAT, ["next_hops::"], "a policy that is ahead of ownership sends by the old address":
        ".filter(|owned| owned.address == slot.address)" => ".filter(|owned| owned.address != Addr::UNSPECIFIED)";

    // Life.
    "expiry-without-last-seen", EXPIRE, ["races::an_entry_in_use"], "a sweep removes what a packet has just used":
        "    maps::swap(last_seen_ns, seen, expiry::GONE) == seen" =>
        "    unsafe extern \"C\" fn pause(_: u64, _: *mut c_void) -> u64 {\n        0\n    }\n    unsafe { aya_ebpf::helpers::generated::bpf_loop(400, pause as *mut c_void, core::ptr::null_mut(), 0) };\n    maps::swap(last_seen_ns, seen, expiry::GONE) != 0";
    "sweep-takes-any-other-key", EXPIRE, ["expiry::"], "a mapping that gets no answers stays for as long as its pod goes on":
        "copy.is_of(&check.key) && copy.other == *key" => "copy.other == *key";
    "idle-mapping-is-used", MAPS, ["expiry::an_idle"], "without an agent an answer reaches a pod long after its connection":
        "        || crate::expiry::is_nat_gone(key, copy.last_seen_ns, run_ns())\n" => "";
    "idle-inbound-is-used", MAPS, ["expiry::an_idle"], "without an agent a pod's datagram leaves with its node's address":
        "if crate::expiry::expire_inbound(tuple, &config.timeouts, false, false) > 0 {" => "if config.generation == 0 {";
    "idle-port-stays-taken", SNAT, ["expiry::an_idle"], "a pod gets another port, which an idle mapping of another one does not need":
        "own == OwnPort::Taken && expire_own_port(forward, tables, pool)" => "false";
    "expiry-of-one-direction", EXPIRY, ["expiry::"], "a download is cut because only answers come":
        "reverse.map_or(0, |reverse| reverse.last_seen_ns).max(forward.last_seen_ns)" => "forward.last_seen_ns";
    "opening-lives-as-established", EXPIRY, ["expiry::"], "unanswered SYNs fill the map for hours":
        "(PROTO_TCP, Phase::Opening) => timeouts.tcp_opening," =>
        "(PROTO_TCP, Phase::Opening) => timeouts.tcp_established,";
    "unreplied-lives-as-answered", EXPIRY, ["expiry::"], "unanswered datagrams fill the map for minutes":
        "(_, Phase::Opening) if timeouts.unreplied < answered => timeouts.unreplied,\n" => "";
    "no-quota-of-mappings", SNAT, ["quota"], "one pod takes the gateway's table from all objects":
        "if !tables.has_quota(&forward.saddr, owner.egress_id, QuotaKind::NatEntries) {" => "if false {";
    "any-address-for-a-destination", SLOTS, ["mixed", "slots::"], "half of the flows of a mixed object go to a network without the destination":
        "let Some(set) = policy.destinations() else" => "let Some(set) = policy.destinations().filter(|_| false) else";
    "waiting-address-is-replaced", SLOTS, ["mixed", "slots::"], "while an address moves, flows to its network leave by another network":
        "if place < candidates.count() && index" => "if index";
    "no-quota-of-flows", SLOTS, ["quota"], "one pod takes its node's table from all others":
        "if !overwrite && !tables.has_quota(" => "if overwrite && !tables.has_quota(";
    "quota-never-uncounted", NAT, ["quota", "oracle::"], "a pod that has once reached its quota is refused for ever":
        "    add(holder, held, -1);\n    if egress_id" => "    if egress_id";
    "fragment-key-without-protocol", FRAGMENTS, ["protocols::"], "a fragment of one protocol gets the ports of another's":
        "protocol: headers.tuple.protocol," => "protocol: 0,";
    "fragment-key-without-identification", FRAGMENTS, ["protocols::"], "a fragment gets the ports of another datagram":
        "id: headers.fragment_id," => "id: [0; 4],";
    "held-fragments-released-late", FRAGMENT, ["fragments::"], "a fragment goes on with another datagram that has its number":
        "if walk.now.saturating_sub(since) <= FRAGMENT_NS {" => "if walk.now >= since {";
    "fragment-of-a-reply-is-a-query", FRAGMENTS, ["to_netdev::"], "the rest of a pod's answer to a long ping shows an egress IP":
        "if ports.is_reply == 0 {" => "if ports.is_reply < 2 {";
    "first-fragment-shows-nothing", FRAGMENTS, ["fragments::"], "later fragments are not recognised":
        "Fragment::First => remember(headers, tables)," => "Fragment::First => {}";
    "foreign-fragment-leaves-ports", FROM_NETDEV, ["fragments::"], "first fragments of other traffic crowd out those of flows":
        "fragments::supersede(headers, tables);\n        return FromNetdev::Done(Verdict::NoNatEntry);" =>
        "fragments::resolve(headers, tables);\n        return FromNetdev::Done(Verdict::NoNatEntry);";
    "guard-waits-for-fragments", TO_NETDEV, ["to_netdev::"], "a first fragment is dropped at the uplink, where it cannot be sent again":
        "from_pod::judge(headers, quote, tables, config, false)" => "from_pod::judge(headers, quote, tables, config, true)";
    "kept-hop-outlives-routes", FIB, ["next_hops::"], "packets go to the old router after a change of routes":
        "hop.generation == generation && is_here" => "is_here";

    // Who may.
    "outer-source-any-address", FROM_OVERLAY, ["encapsulation::"], "what a pod sends to a node's port passes for a node's packet":
        "node.place() == NodePlace::Other && node.node == outer.source" => "node.place() == NodePlace::Other";
    "outer-source-unchecked", FROM_OVERLAY, ["encapsulation::"], "anybody who knows a node's address there is a node":
        "sender(outer, tables) else" => "sender(outer, tables).or(tables.node(&config.self_node)) else";
    "inner-source-unchecked", FROM_OVERLAY, ["encapsulation::"], "a node can send with any source":
        "let owned = match of_sender {" => "let owned = match of_sender || outer.egress_id != 0 {";
    "reply-to-any-pod", FROM_OVERLAY, ["encapsulation::", "from_overlay::"], "what the world sends to a former pod reaches who has its address now":
        "policy_of(pod, answered, tables) != Some(outer.egress_id)" => "policy_of(pod, answered, tables) == Some(0)";
    "reply-of-another-destination", FROM_OVERLAY, ["encapsulation::"], "a gateway answers for destinations that the pod has another policy for":
        "policy_of(pod, answered, tables) != Some(outer.egress_id)" => "!pod.is_selected()";
    "class-without-entries-passes", DECIDE, ["classes::"], "pods whose class does not fit in the map leave with their node's address":
        "            None => Some(0),\n" => "            None => None,\n";
    "class-ignores-the-destination", FROM_POD, ["classes::"], "every packet of a pod is dropped, whatever its destination":
        "let (is_selected, egress_id) = match pod.and_then(|pod| policy_of(pod, &headers.tuple.daddr, tables)) {" =>
        "let (is_selected, egress_id) = match pod.and_then(|pod| pod.egress_id()) {";
    "class-connection-changes-its-address", FROM_POD, ["classes::"], "a connection goes on with its node's address when its destination has no policy any more":
        "LeftOver::Cut => return FromPod::Reset(Verdict::FlowCut)," => "LeftOver::Cut => return FromPod::Done(Verdict::NotSelected),";
    "sweep-removes-marked-entries", EXPIRE, ["expiry::"], "the sweep removes half of a NAT entry that a packet has just made":
        "SweptMap::Nat if is_marked => remove_stuck_nat(key, check)," => "SweptMap::Nat if !is_any => remove_stuck_nat(key, check) + expire_nat(key, &sweep.timeouts, check),";
    "own-pod-guard-skipped", TO_NETDEV, ["to_netdev::"], "a selected pod's packet leaves with the pod's address":
        "let verdict = guard_own(headers, quote, tables, config);" => "let verdict = Verdict::NotOurs;";
    "foreign-pod-guard-skipped", TO_NETDEV, ["to_netdev::"], "another node's pod leaves with its own address":
        "ToNetdev::Done(guard_foreign(headers, tables, config))" => "ToNetdev::Done(Verdict::NotOurs)";
    "mark-lets-pods-out", TO_NETDEV, ["to_netdev::"], "another node's pod leaves with its own address, if marked":
        "let verdict = guard_foreign(headers, tables, config);" => "let verdict = Verdict::NotOurs;";
    "tunnel-guard-skipped", TO_NETDEV, ["to_netdev::"], "a pod makes overlay packets of its own":
        "if meta.forwarded && headers.may_be_udp_to" => "if meta.forwarded && meta.returning && headers.may_be_udp_to";
    "mark-left-after-snat", PROGRAM_TO_NETDEV, ["replies::"], "the stack's rules for mark 1008 meet a packet that is translated already":
        "ToNetdev::NodeSnat => {\n            packet.set_mark(meta.mark & !NODE_MARK);" => "ToNetdev::NodeSnat => {";
    "mark-left-on-what-the-stack-translated", PROGRAM_TO_NETDEV, ["to_netdev::", "replies::"], "mark 1008 goes on to devices behind":
        "ToNetdev::Unmark => {\n            packet.set_mark(meta.mark & !NODE_MARK);" => "ToNetdev::Unmark => {";
    "seen-not-said", MAIN, ["to_netdev::"], "what steering leaves to the stack is dropped there":
        "packet.set_priority(seen);" => "packet.set_priority(seen & 1);";
    "a-sockets-priority-passes", PROGRAM_TO_NETDEV, ["to_netdev::"], "a process with a raw socket sends from the address of a pod":
        "packet.takes_off_redirected(config) && packet.is_received()" => "packet.takes_off_redirected(config)";
    "seen-priority-not-published", CONFIG, ["to_netdev::"], "packets pass the stack with a priority that no rule removes":
        "if self.seen == 0 { None }" => "if self.seen == 1 { None }";
    "no-policy-passes", SLOTS, ["from_pod::"], "a selected pod leaves with the node's address until its policy is there":
        ".ok_or(Verdict::NoPolicy)" => ".ok_or(Verdict::NotSelected)";
    "unasked-packets-pass", FROM_NETDEV, ["replies::"], "what the world sends to an egress IP reaches the host":
        "headers, tables);\n        return FromNetdev::Done(Verdict::NoNatEntry);" =>
        "headers, tables);\n        return FromNetdev::Done(Verdict::NotOurs);";
    "half-a-hand-over-passes-on", FROM_NETDEV, ["handover::"], "a node whose agent is killed in the middle of letting go sends its answers away":
        "!passed && !is_held(egress_id, &headers.tuple.daddr, tables)" => "!passed";
    "error-goes-by-its-own-ends", FROM_NETDEV, ["handover::"], "an ICMP error about what the new owner has sent goes to the old node":
        "L4::IcmpError => quote.flow(),\n        _ =>" => "L4::IcmpError => &headers.tuple,\n        _ =>";
    "clients-are-passed-on", FROM_NETDEV, ["shared_addresses::"], "a Service's clients lose their connections while its address moves":
        "&& tables.exposure(&port).is_none();" => "&& port.protocol != 0;";
    "only-known-flows-are-passed-on", FROM_NETDEV, ["shared_addresses::"], "new connections lose their answers while a Service's address moves":
        "&& tables.exposure(&port).is_none();" => "&& tables.nat_peek(reverse).is_some();";
    "quote-of-another-address", FROM_NETDEV, ["icmp_errors::"], "an ICMP error about one egress IP comes in by another":
        "quote.tuple().saddr == headers.tuple.daddr" => "quote.tuple().protocol != 0";
    "answers-to-the-world-translated", FROM_POD, ["replies::", "to_netdev::"], "answers to connections from outside get an egress IP":
        "} else if may_answer(headers) && tables.inbound_answered(&headers.tuple, headers.of_pod()) {" =>
        "} else if headers.ttl == 0 && tables.inbound_answered(&headers.tuple, headers.of_pod()) {";
    "settled-outlives-decisions", FROM_POD, ["from_pod::"], "flows go on as before when what was decided about them has changed":
        "flow.settled_under(config.decisions)" => "flow.settled_under(flow.decided)";
    "settled-unsealed", FLOWS, ["races::"], "a slot and the number of decisions that it was not asked under are taken for one":
        "if self.decided == decisions && is_whole {" => "if self.decided == decisions && (is_whole || decisions != 0) {";
    "hop-unsealed", FIB, ["races::"], "half a next hop that another CPU is just writing is taken for one":
        "|| hop.is_of(lookup.seal)" => "|| hop.is_of(lookup.seal) || hop.mtu < 1500";
    // With a pause between finding and reading: without one it takes hours to meet.
    "bloom-filter-forgets", FROM_NETDEV, ["replies::"], "answers to an egress IP are taken for the host's, which resets them":
        "!may_be_nodes && !config.owned.may_contain(&plain.daddr)" => "!may_be_nodes";
    "bloom-filter-takes-the-nodes-ports", FROM_NETDEV, ["replies::"], "answers to packets with the mark are taken for the host's":
        "!may_be_nodes && !config.owned" => "!config.owned";
    "recent-outlives-decisions", FLOW_CACHE, ["flow_cache::"], "packets go the old way after the agent has decided otherwise":
        "&& cached.generations == generations" => "&& cached.generations.epoch == generations.epoch";
    "recent-outlives-removals", FLOW_CACHE, ["flow_cache::"], "packets go on with a port that is another flow's by now":
        "&& cached.generations == generations" => "&& cached.generations.decisions == generations.decisions";
    "recent-outlives-routes", FLOW_CACHE, ["flow_cache::"], "packets go to a router that is none any more":
        "&& cached.generations == generations" =>
        "&& cached.generations.epoch == generations.epoch && cached.generations.decisions == generations.decisions";
    "recent-of-any-flow", FLOW_CACHE, ["flow_cache::"], "a packet gets the address and port of another flow":
        "if cached.key != headers.tuple {" => "if cached.key.protocol != headers.tuple.protocol {";
    "recent-of-any-node", FLOW_CACHE, ["flow_cache::"], "another node's packets get an egress IP without being asked who they are":
        "cached.node == outer.source && cached.egress_id == outer.egress_id" => "cached.egress_id == outer.egress_id";
    "recent-of-any-object", FLOW_CACHE, ["flow_cache::"], "packets of another object get this one's address":
        "cached.node == outer.source && cached.egress_id == outer.egress_id" => "cached.node == outer.source";
    "recent-for-resets", FLOW_CACHE, ["flow_cache::", "expiry::"], "a connection that is reset lives on as if it were not":
        "const SAYS_MORE: u8 = tcp::SYN | tcp::FIN | tcp::RST;" => "const SAYS_MORE: u8 = tcp::SYN | tcp::FIN;";
    "recent-for-last-hops", FLOW_CACHE, ["flow_cache::"], "packets go round for ever":
        "&& headers.ttl > 1 && !headers.source_routed;" => "&& !headers.source_routed;";
    "reset-raises-no-epoch", MAPS, ["flow_cache::"], "a forged reset ends the NAT entry of a live connection":
        "        raise_epoch(&copy.other);\n        raise_epoch(key);" => "";
    "opening-raises-no-epoch", MAPS, ["flow_cache::"], "a restarted connection counts as unanswered":
        "if tcp_flags & (tcp::SYN | tcp::RST) != 0 {" => "if tcp_flags & tcp::RST != 0 {";
    "pods-reset-raises-no-epoch", MAPS, ["flow_cache::"], "a connection that goes on after a reset ends as a closed one":
        "if tcp_flags & (tcp::SYN | tcp::RST) != 0 {" => "if tcp_flags & tcp::SYN != 0 {";
    "inbound-removal-raises-no-epoch", MAPS, ["flow_cache::"], "a pod's connection leaves with the pod's address":
        "count_inbound(tuple, -1);\n        raise_epoch(tuple);" => "count_inbound(tuple, -1);";
    "mapping-unsealed", MAPS, ["reuse::"], "what another flow has in the memory of a removed mapping is written into a packet":
        "let copy = copied(nat_entry, &mut found()?.nat_entry);\n    if !copy.is_of(key)\n        || " =>
        "unsafe extern \"C\" fn pause(_: u64, _: *mut core::ffi::c_void) -> u64 {\n        0\n    }\n    unsafe { aya_ebpf::helpers::generated::bpf_loop(4000, pause as *mut core::ffi::c_void, ptr::null_mut(), 0) };\n    let copy = copied(nat_entry, &mut found()?.nat_entry);\n    if ";
    "pod-unsealed", MAPS, ["reuse::"], "packets of a selected pod leave as those of a pod that nothing selects":
        "if copied(pod, space).is_of(addr) {" =>
        "unsafe extern \"C\" fn pause(_: u64, _: *mut core::ffi::c_void) -> u64 {\n        0\n    }\n        unsafe { aya_ebpf::helpers::generated::bpf_loop(4000, pause as *mut core::ffi::c_void, ptr::null_mut(), 0) };\n        if copied(pod, space).seal != 0 {";

    "adopted-key-believed", SNAT, ["races::"], "a flow's answers find no mapping, or those of another flow reach its pod":
        "if port.ours { Forward::Stands } else { Forward::NeedsReverse }" => "Forward::Stands";
    "key-taken-back-for-good", SNAT, ["races::"], "a flow's answers find no mapping, or those of another flow reach its pod":
        "        if is_named() {\n            return Ok(Forward::NeedsReverse);\n        }\n" => "";
    "own-port-asked-for-once", SNAT, ["races::"], "a connection is reset although its port is free":
        "for _ in 0..2 {\n        match tables.claim_nat" => "for _ in 0..1 {\n        match tables.claim_nat";

    // Connections that were cut.
    "piece-of-a-cut-connection", FROM_POD, ["resets::"], "what is left of a cut connection leaves with another source":
        "if gets_reset && headers.l4 == L4::Later {" => "if false {";
    "cut-connection-goes-on", FROM_POD, ["resets::"], "a deselected pod's connection goes on with another source":
        "LeftOver::Cut => return FromPod::Reset(Verdict::FlowCut)," => "LeftOver::Cut => return FromPod::Done(Verdict::NotSelected),";
    "port-lost-in-silence", PROGRAM_TO_NETDEV, ["to_netdev::"], "a pod's connection with the node's address hangs until the pod gives up":
        "icmp::reset_pod_from_uplink(run, buffer, route, verdict)" => "Outcome::done(verdict)";
    "reset-with-the-senders-number", RESET, ["resets::"], "the pod does not accept the reset and waits for ever":
        "return (self.acknowledged, 0, tcp::RST);" => "return (self.sequence, 0, tcp::RST);";
    "reset-for-a-reset", RESET, ["resets::"], "two ends may tell one another for ever":
        "        && headers.tcp_flags & tcp::RST == 0\n" => "";

    "answers-that-are-none-limited", ICMP, ["answers::"], "packets without an answer use up the budget of answers":
        "wire_reset::answers(run.headers) && may_answer(kind, pod)" => "may_answer(kind, pod) && wire_reset::answers(run.headers)";
    "answers-without-limit", LIMIT, ["answers::"], "forged packets cause as many answers":
        "Some(due + self.step_ns)" => "Some(due)";
    "answers-without-total", LIMIT, ["answers::"], "many pods together cause any number of answers":
        "TOTAL.take(total, now_ns)?" => "total";
    "one-budget-for-all-pods", ICMP, ["answers::"], "one pod takes path MTU discovery from all others":
        "AnswerKey::new(*pod, kind)" => "AnswerKey::new(Addr::UNSPECIFIED, kind)";
    "one-budget-for-all-kinds", ICMP, ["answers::"], "resets take path MTU discovery from their pod":
        "AnswerKey::new(*pod, kind)" => "AnswerKey::new(*pod, AnswerKind::TooBigToPod)";
    "budget-of-the-peer", ICMP, ["answers::"], "each peer of a pod, and each forged one, has a budget":
        "&found.nat_entry.other.saddr" => "&found.nat_entry.other.daddr";

    // Bandwidth limits and random ports.
    "packets-wait-beyond-the-lease", PROGRAM_PACE, ["bandwidth::"], "packets leave from an address that another node serves by now":
        "lease::left_ns_inline().min(HORIZON_NS)" => "lease::left_ns_inline().max(HORIZON_NS)";
    "packets-wait-on-every-uplink", PROGRAM_PACE, ["bandwidth::"], "without `fq`, packets beyond a limit leave at once":
        "run.config.paced_uplink != 0 && ifindex" => "run.config.paced_uplink != 2 && ifindex";
    "a-pause-saves-everything", PROGRAM_PACE, ["bandwidth::"], "a policy that was silent for an hour sends an hour's worth at once":
        "swap(state, sent, now + time)" => "swap(state, sent, sent + time)";
    "segments-without-headers", PROGRAM_PACE, ["bandwidth::"], "small segments exceed the limit by half":
        "mtu::wire_bytes(run.packet.len() as u32, run.packet.gso_size(), run.headers)" => "run.packet.len() as u32 + 0 * mtu::wire_bytes(0, 0, run.headers)";
    "flow-cache-without-limit", FLOW_CACHE, ["bandwidth::"], "a limit holds for the first packet of a connection alone":
        "cached.verdict |= LIMITED;" => "cached.verdict |= 0;";
    "limit-without-burst", PACE, ["bandwidth::"], "TCP through a limit stands still":
        "ahead.saturating_sub(limit.burst_ns())" => "ahead";
    "limit-drops-nothing", PROGRAM_PACE, ["bandwidth::"], "a limit without `fq` limits nothing":
        "PacketDeparture::Never => return Err(Verdict::RateLimited),\n    }" => "PacketDeparture::Never => {}\n    }";
    "ports-of-pods-kept", SNAT, ["bandwidth::"], "the ports outside can be guessed from the pod's":
        "!tables.has_random_ports() ||" => "true ||";

    // Port blocks.
    "blocks-of-other-pods", PROGRAM_NAT, ["blocks::"], "a pod uses ports that the record of blocks gives to another one":
        "owner.pod == holder.pod && owner.size == size" => "owner.size == size";
    "blocks-that-are-closed", PROGRAM_NAT, ["blocks::"], "a pod uses ports of a block that is about to go to another one":
        "owner.is_open() && owner.is_of(&block)" => "owner.is_of(&block)";
    "blocks-without-end", SNAT_BLOCKS, ["blocks::"], "a pod uses up the ports of all others":
        "if own.is_full() || has_failed(" => "if has_failed(";
    "blocks-that-are-lost", SNAT_BLOCKS, ["decide::snat::"], "a block that no list names belongs to a pod that does not use it":
        "close_block(tables, pool, first);\n" => "let _lost = first;\n";
    "ports-outside-of-blocks", SNAT, ["blocks::"], "an address and a port do not tell the pod":
        "if !blocks::are_used(tables, owner) {\n        return find_port" => "if true {\n        return find_port";

    // Lengths and answers.
    "too-long-for-a-pod-taken-out", PROGRAM_OVERLAY, ["encapsulation::"], "nodes that veth devices connect drop replies that they should fragment":
        "if packet.len() > L3 + overhead(family) + config.pod_mtu as usize {" => "if packet.len() == 0 {";
    "overlay-limit-without-overhead", MTU, ["generated_errors::"], "packets that do not fit with their tunnel header are sent":
        "if length <= overlay_mtu {" => "if length <= overlay_mtu + 50 {";
    "segment-without-header", MTU, ["generated_errors::"], "segments of a large packet are longer than the way takes":
        "size => size + headers.header_len()," => "size => size,";
    "link-header-counts", MTU, ["generated_errors::"], "packets that just fit are refused":
        "frame_len.saturating_sub(L3 as u32)" => "frame_len";
    "arp-answer-with-the-askers-mac", PROGRAM_FROM_NETDEV, ["neighbours::"], "the network sends the egress IP's packets to the host that asked":
        "message.answer(owned.mac)" => "message.answer(message.sender_mac)";
    "neighbour-answer-with-the-askers-mac", PROGRAM_FROM_NETDEV, ["neighbours::"], "the network sends the egress IP's packets to the host that asked":
        "solicitation.answer(owned.mac, frame);" => "solicitation.answer(solicitation.answer_mac(), frame);";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::testing::mutate::copy::mutated;
    use egress_toolchain::Paths;

    #[test]
    fn every_text_is_in_its_file_exactly_once() {
        let root = Paths::find().expect("the clone").root;
        let stale: Vec<_> = all().filter_map(|mutation| mutated(&root, mutation).err()).collect();
        assert!(stale.is_empty(), "{stale:#?}");
    }

    /// What the tests must notice whatever else becomes of the table.
    #[test]
    fn the_five_kinds_are_in_it() {
        for name in [
            "verdict-dropped",
            "ipv4-addresses-swapped",
            "pseudo-header-checksum",
            "keys-mixed",
            "expiry-without-last-seen",
        ] {
            assert!(all().any(|mutation| mutation.name == name), "{name}");
        }
    }

    #[test]
    fn names_are_single() {
        let names: BTreeSet<_> = all().map(|mutation| mutation.name).collect();
        assert_eq!(names.len(), all().count());
    }
}
