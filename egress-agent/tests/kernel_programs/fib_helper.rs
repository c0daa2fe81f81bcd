//! What `bpf_fib_lookup` answers for a named interface: the facts of docs/adr/0019-egress-interfaces.md, on the running
//! kernel.
//!
//! ```text
//!   nic0   172.18.0.2/16    fd00:172:18::2/64     the default route of least metric, by 172.18.0.1 or fd00:172:18::1
//!   nic1   10.10.10.2/24    fd00:10:10:10::2/64   another default route, by 10.10.10.1 or fd00:10:10:10::1
//! ```
//!
//! The programs under test are not needed: a program of a few instructions asks the helper with the bytes of its packet,
//! and writes the answer into them.

#![expect(unsafe_code, reason = "the one system call for which aya has no function: a program that is no object file")]

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::process::Command;

use nix::sched::{CloneFlags, unshare};

use crate::devices::batch;
use crate::frames::ip;
use crate::skips::skipped;
use crate::test_run::test_run_of;

/// Flags of the helper (linux/bpf.h).
const DIRECT: u32 = 1;
const OUTPUT: u32 = 2;
/// Linux 6.3.
const SKIP_NEIGH: u32 = 4;
/// Linux 6.5.
const TBID: u32 = 8;

/// Return values of the helper.
const SUCCESS: i32 = 0;
const NOT_FWDED: i32 = 4;
const FWD_DISABLED: i32 = 5;
const NO_NEIGH: i32 = 7;

const NIC0: u32 = 31;
const NIC1: u32 = 32;

/// A routing table without a rule, until a test makes one.
const TABLE: u32 = 100;

/// Addresses of a family.
struct Network {
    /// Of another host in the network of `nic1`, as an egress IP is.
    egress: &'static str,
    router0: &'static str,
    router1: &'static str,
    /// A second router in the network of `nic1`.
    router2: &'static str,
    /// Everything.
    whole: &'static str,
    world: &'static str,
    world_net: &'static str,
    /// In front of the last number of an address of `spread_net`.
    spread: &'static str,
    spread_net: &'static str,
    forwarding: &'static str,
}

const V4: Network = Network {
    egress: "10.10.10.100",
    router0: "172.18.0.1",
    router1: "10.10.10.1",
    router2: "10.10.10.3",
    whole: "0.0.0.0/0",
    world: "198.51.100.10",
    world_net: "198.51.100.0/24",
    spread: "203.0.113.",
    spread_net: "203.0.113.0/24",
    forwarding: "/proc/sys/net/ipv4/conf/nic1/forwarding",
};

const V6: Network = Network {
    egress: "fd00:10:10:10::100",
    router0: "fd00:172:18::1",
    router1: "fd00:10:10:10::1",
    router2: "fd00:10:10:10::3",
    whole: "::/0",
    world: "2001:db8::10",
    world_net: "2001:db8::/64",
    spread: "2001:db8:5::",
    spread_net: "2001:db8:5::/64",
    forwarding: "/proc/sys/net/ipv6/conf/nic1/forwarding",
};

impl Network {
    fn is_v4(&self) -> bool {
        ip(self.world).is_ipv4()
    }
}

/// A question to the helper.
struct FibQuestion<'a> {
    flags: u32,
    ifindex: u32,
    saddr: &'a str,
    daddr: &'a str,
    /// Meaningful with [`TBID`].
    table: u32,
}

/// What the helper has written; an address only where it has found a route.
#[derive(Debug, PartialEq, Eq)]
struct FibAnswer {
    result: i32,
    ifindex: u32,
    next_hop: IpAddr,
    dmac: [u8; 6],
}

impl FibAnswer {
    /// A route by a known neighbour.
    fn found(ifindex: u32, next_hop: &str) -> Self {
        Self { result: SUCCESS, ifindex, next_hop: ip(next_hop), dmac: lladdr(next_hop) }
    }
}

/// The link address that a test gives to a router.
fn lladdr(router: &str) -> [u8; 6] {
    match ip(router) {
        IpAddr::V4(address) => [2, 0, 0, 4, address.octets()[0], address.octets()[3]],
        IpAddr::V6(address) => [2, 0, 0, 6, address.octets()[3], address.octets()[15]],
    }
}

/// Size of `struct bpf_fib_lookup` (linux/bpf.h), and of that and the flags.
const PARAMS: usize = 64;
const ASKED: usize = 72;

/// Length of the Ethernet header before them in the packet.
const HEADER: usize = 14;

/// The program: copies the question from its packet to the stack, calls the helper, copies the answer back, and returns
/// the helper's result. One instruction (linux/bpf.h) is code, registers (source, destination), offset and immediate.
#[expect(clippy::cast_possible_truncation, reason = "sizes of a few bytes")]
const PROGRAM: [(u8, u8, i16, i32); 26] = {
    const SKB_STORE_BYTES: i32 = 9;
    const SKB_LOAD_BYTES: i32 = 26;
    const FIB_LOOKUP: i32 = 69;
    const ADD: u8 = 0x07;
    const JUMP_UNLESS: u8 = 0x55;
    const LOAD_WORD: u8 = 0x61;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    const SET: u8 = 0xb7;
    const COPY: u8 = 0xbf;
    [
        (COPY, 0x16, 0, 0),
        (SET, 0x02, 0, HEADER as i32),
        (COPY, 0xa3, 0, 0),
        (ADD, 0x03, 0, -(ASKED as i32)),
        (SET, 0x04, 0, ASKED as i32),
        (CALL, 0x00, 0, SKB_LOAD_BYTES),
        (JUMP_UNLESS, 0x00, 17, 0),
        (COPY, 0x61, 0, 0),
        (COPY, 0xa2, 0, 0),
        (ADD, 0x02, 0, -(ASKED as i32)),
        (SET, 0x03, 0, PARAMS as i32),
        (LOAD_WORD, 0xa4, PARAMS as i16 - ASKED as i16, 0),
        (CALL, 0x00, 0, FIB_LOOKUP),
        (COPY, 0x07, 0, 0),
        (COPY, 0x61, 0, 0),
        (SET, 0x02, 0, HEADER as i32),
        (COPY, 0xa3, 0, 0),
        (ADD, 0x03, 0, -(ASKED as i32)),
        (SET, 0x04, 0, PARAMS as i32),
        (SET, 0x05, 0, 0),
        (CALL, 0x00, 0, SKB_STORE_BYTES),
        (JUMP_UNLESS, 0x00, 2, 0),
        (COPY, 0x70, 0, 0),
        (EXIT, 0x00, 0, 0),
        (SET, 0x00, 0, UNREADABLE),
        (EXIT, 0x00, 0, 0),
    ]
};

/// What the program returns where it cannot read or write its packet.
const UNREADABLE: i32 = -1000;

/// The loaded program.
struct FibHelper(OwnedFd);

impl FibHelper {
    fn load() -> Self {
        /// `union bpf_attr` for `BPF_PROG_LOAD`, as far as it is not zero.
        #[repr(C)]
        struct LoadAttr {
            prog_type: u32,
            insn_cnt: u32,
            insns: u64,
            license: u64,
        }
        const BPF_PROG_LOAD: libc::c_long = 5;
        const SCHED_CLS: u32 = 3;
        let code: Vec<u8> = PROGRAM
            .iter()
            .flat_map(|(code, registers, offset, immediate)| {
                let ([a, b], [c, d, e, f]) = (offset.to_le_bytes(), immediate.to_le_bytes());
                [*code, *registers, a, b, c, d, e, f]
            })
            .collect();
        let attr = LoadAttr {
            prog_type: SCHED_CLS,
            insn_cnt: u32::try_from(PROGRAM.len()).expect("few"),
            insns: code.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
        };
        let size = size_of::<LoadAttr>() as libc::c_ulong;
        // SAFETY: this is the kernel's layout for this command, and its size; the pointers in it are to live memory of
        // these lengths, which the kernel only reads.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attr, size) };
        assert!(fd >= 0, "load the program: {}", io::Error::last_os_error());
        // SAFETY: the kernel has just opened it for this process, and nothing else has it.
        Self(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) })
    }

    /// The result alone is known where the helper has found no route.
    fn ask(&self, question: &FibQuestion<'_>) -> Result<FibAnswer, i32> {
        const FAMILY: usize = 0;
        const TOT_LEN: usize = 6;
        const IFINDEX: usize = 8;
        const SADDR: usize = 16;
        const DADDR: usize = 32;
        const TABLE_AT: usize = 48;
        const DMAC: usize = 58;
        let mut frame = [0; HEADER + ASKED];
        let params = &mut frame[HEADER..];
        for (at, address) in [(SADDR, ip(question.saddr)), (DADDR, ip(question.daddr))] {
            match address {
                IpAddr::V4(address) => params[at..at + 4].copy_from_slice(&address.octets()),
                IpAddr::V6(address) => params[at..at + 16].copy_from_slice(&address.octets()),
            }
        }
        let is_v4 = ip(question.daddr).is_ipv4();
        params[FAMILY] = u8::try_from(if is_v4 { libc::AF_INET } else { libc::AF_INET6 }).expect("a small number");
        // As the programs ask for the MTU of the route.
        params[TOT_LEN] = 1;
        params[IFINDEX..IFINDEX + 4].copy_from_slice(&question.ifindex.to_ne_bytes());
        params[TABLE_AT..TABLE_AT + 4].copy_from_slice(&question.table.to_ne_bytes());
        params[PARAMS..].copy_from_slice(&[question.flags, 0].map(u32::to_ne_bytes).concat());
        let (result, out) = test_run_of(self.0.as_fd(), &frame);
        assert_ne!(result, UNREADABLE, "the packet is long enough");
        if result != SUCCESS && result != NO_NEIGH {
            return Err(result);
        }
        let params = &out[HEADER..];
        let next_hop = if is_v4 {
            IpAddr::from(<[u8; 4]>::try_from(&params[DADDR..DADDR + 4]).expect("four bytes"))
        } else {
            IpAddr::from(<[u8; 16]>::try_from(&params[DADDR..DADDR + 16]).expect("sixteen bytes"))
        };
        let ifindex = u32::from_ne_bytes(params[IFINDEX..IFINDEX + 4].try_into().expect("four bytes"));
        let dmac = params[DMAC..DMAC + 6].try_into().expect("six bytes");
        Ok(FibAnswer { result, ifindex, next_hop, dmac })
    }
}

/// Runs the test for both families, each in a network namespace of its own with the devices above.
fn on_two_interfaces(test: impl Fn(&FibHelper, &Network) + Send + Sync + 'static) {
    if !nix::unistd::geteuid().is_root() {
        skipped("needs root");
        return;
    }
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        for network in [V4, V6] {
            unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
            make_interfaces();
            test(&FibHelper::load(), &network);
        }
    });
    if let Err(panic) = thread.expect("start a thread").join() {
        std::panic::resume_unwind(panic);
    }
}

fn make_interfaces() {
    for switch in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{switch}"), "1").expect("forward packets");
    }
    let mut script = format!(
        "link set lo up\n\
         link add nic0 index {NIC0} type veth peer name out0\n\
         link add nic1 index {NIC1} type veth peer name out1\n\
         addr add 172.18.0.2/16 dev nic0\n\
         addr add fd00:172:18::2/64 dev nic0 nodad\n\
         link set nic0 up\nlink set out0 up\nlink set nic1 up\nlink set out1 up\n"
    );
    script.push_str(NIC1_ADDRESSES);
    for network in [V4, V6] {
        script.push_str(&format!("route add {} via {} dev nic0 metric 100\n", network.whole, network.router0));
        script.push_str(&neighbour(network.router0, "nic0"));
        script.push_str(&neighbour(network.router1, "nic1"));
        script.push_str(&neighbour(network.router2, "nic1"));
    }
    batch(&script);
}

const NIC1_ADDRESSES: &str = "addr add 10.10.10.2/24 dev nic1\naddr add fd00:10:10:10::2/64 dev nic1 nodad\n";

fn neighbour(router: &str, device: &str) -> String {
    let mac = lladdr(router).map(|byte| format!("{byte:02x}")).join(":");
    format!("neigh replace {router} lladdr {mac} dev {device} nud permanent\n")
}

/// The default route of `nic1`, of higher metric than that of `nic0`.
fn default_of_nic1(network: &Network, table: &str) -> String {
    format!("route add {} via {} dev nic1 metric 200 {table}\n", network.whole, network.router1)
}

/// What an egress IP of `nic1` asks for the world.
fn of_nic1<'a>(network: &Network, flags: u32, daddr: &'a str) -> FibQuestion<'a> {
    FibQuestion { flags, ifindex: NIC1, saddr: network.egress, daddr, table: 0 }
}

/// IPv4 looks at routes of the named device only. For IPv6 the device is a preference among routes of one prefix and
/// metric: another device wins by a lower metric, and by a longer prefix.
#[test]
fn fib_helper_finds_the_routes_of_a_named_interface_for_ipv4_alone() {
    on_two_interfaces(|helper, network| {
        batch(&default_of_nic1(network, ""));
        let by_nic0 = Ok(FibAnswer::found(NIC0, network.router0));
        let by_nic1 = Ok(FibAnswer::found(NIC1, network.router1));
        let expected = if network.is_v4() { by_nic1 } else { by_nic0 };
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), expected, "a lower metric");
        batch(&format!("route add {} via {} dev nic0 metric 300\n", network.world_net, network.router0));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), expected, "a longer prefix");
        // The longest match among its own.
        batch(&format!("route add {} via {} dev nic1 metric 200\n", network.world_net, network.router2));
        let own = Ok(FibAnswer::found(NIC1, network.router2));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), own);
    });
}

/// A neighbour that is not known is an answer too, with device and next hop.
#[test]
fn fib_helper_names_a_next_hop_without_a_link_address() {
    on_two_interfaces(|helper, network| {
        batch(&format!("neigh del {} dev nic0\n", network.router0));
        let asked = FibQuestion { ifindex: NIC0, ..of_nic1(network, OUTPUT, network.world) };
        let answer = helper.ask(&asked).expect("a route");
        assert_eq!((answer.result, answer.ifindex, answer.next_hop), (NO_NEIGH, NIC0, ip(network.router0)));
    });
}

/// With an output device the helper takes the first hop of a multipath route for every destination; with an input device
/// it takes each hop for some.
#[test]
fn fib_helper_takes_one_hop_of_a_multipath_route_by_a_named_interface() {
    on_two_interfaces(|helper, network| {
        let hops = [network.router1, network.router2].map(|router| format!("nexthop via {router} dev nic1"));
        batch(&format!("route add {} {}\n", network.spread_net, hops.join(" ")));
        let by = |flags| -> BTreeSet<IpAddr> {
            let destinations = (1..=64).map(|last| format!("{}{last}", network.spread));
            let answers = destinations.map(|to| helper.ask(&of_nic1(network, flags, &to)).expect("a route"));
            answers.map(|answer| answer.next_hop).collect()
        };
        assert_eq!(by(OUTPUT), BTreeSet::from([ip(network.router1)]));
        assert_eq!(by(0), BTreeSet::from([ip(network.router1), ip(network.router2)]));
    });
}

/// So the link address of a link-local router is only known through a route by it.
#[test]
fn fib_helper_answers_nothing_about_a_link_local_address() {
    const ROUTER: &str = "fe80::1";
    on_two_interfaces(|helper, network| {
        if network.is_v4() {
            return;
        }
        batch(&neighbour(ROUTER, "nic1"));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, ROUTER)), Err(NOT_FWDED));
        let from_it = FibQuestion { saddr: ROUTER, ..of_nic1(network, OUTPUT, network.router1) };
        assert_eq!(helper.ask(&from_it), Err(NOT_FWDED));
        batch(&format!("route add {} via {ROUTER} dev nic1\n", network.world_net));
        let through = Ok(FibAnswer::found(NIC1, ROUTER));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), through);
    });
}

#[test]
fn fib_helper_answers_nothing_without_forwarding_on_the_named_interface() {
    on_two_interfaces(|helper, network| {
        batch(&format!("route add {} via {} dev nic1\n", network.world_net, network.router1));
        let found = Ok(FibAnswer::found(NIC1, network.router1));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), found);
        std::fs::write(network.forwarding, "0").expect("stop to forward");
        for flags in [OUTPUT, OUTPUT | DIRECT, 0] {
            assert_eq!(helper.ask(&of_nic1(network, flags, network.world)), Err(FWD_DISABLED), "{flags}");
        }
        // That of another interface does not count.
        let of_nic0 = FibQuestion { ifindex: NIC0, ..of_nic1(network, OUTPUT, network.router0) };
        assert_eq!(helper.ask(&of_nic0), Ok(FibAnswer::found(NIC0, network.router0)));
    });
}

/// The table of a VRF has the routes of its interfaces alone, so IPv6 finds them too.
#[test]
fn fib_helper_finds_the_table_of_a_vrf() {
    on_two_interfaces(|helper, network| {
        let table = TABLE.to_string();
        let made = Command::new("ip").args(["link", "add", "vrf0", "type", "vrf", "table", &table]).output();
        let made = made.expect("run ip");
        if !made.status.success() {
            // Noted once, for both families.
            if network.is_v4() {
                skipped(&format!("no VRF: {}", String::from_utf8_lossy(&made.stderr).trim()));
            }
            return;
        }
        batch("link set vrf0 up\nlink set nic1 master vrf0\n");
        // The kernel removes the IPv6 addresses of a device that moves into a VRF.
        let addresses = NIC1_ADDRESSES.replace("addr add", "addr replace");
        batch(&format!("{addresses}{}", default_of_nic1(network, &format!("table {TABLE}"))));
        batch(&neighbour(network.router1, "nic1"));
        let found = Ok(FibAnswer::found(NIC1, network.router1));
        assert_eq!(helper.ask(&of_nic1(network, OUTPUT, network.world)), found);
    });
}

/// For IPv6 a rule by source matches nothing, since the helper does not say that it has a source. With [`DIRECT`] no rule
/// counts, and for IPv6 the device is no more than a preference there either.
#[test]
fn fib_helper_follows_rules_by_source_for_ipv4_alone() {
    on_two_interfaces(|helper, network| {
        batch(&default_of_nic1(network, &format!("table {TABLE}")));
        let by_nic0 = Ok(FibAnswer::found(NIC0, network.router0));
        let by_nic1 = Ok(FibAnswer::found(NIC1, network.router1));
        let asked = |flags| helper.ask(&of_nic1(network, flags, network.world));
        rule(network, ["from", network.egress]);
        assert_eq!(&asked(OUTPUT), if network.is_v4() { &by_nic1 } else { &by_nic0 }, "by source");
        rule(network, ["to", network.world]);
        assert_eq!(asked(OUTPUT), by_nic1, "by destination");
        // The main table has the default route of the other device alone.
        let direct = if network.is_v4() { Err(NOT_FWDED) } else { by_nic0 };
        assert_eq!(asked(OUTPUT | DIRECT), direct);
    });
}

/// Looks up what this selects in [`TABLE`]. Not in a batch, which is of one family.
fn rule(network: &Network, selector: [&str; 2]) {
    let family = if network.is_v4() { "-4" } else { "-6" };
    let table = TABLE.to_string();
    let arguments = [&[family, "rule", "add"], &selector[..], &["lookup", &table, "pref", "500"]].concat();
    assert!(Command::new("ip").args(&arguments).status().expect("run ip").success(), "ip refused {arguments:?}");
}

/// The two flags that would help came later than Linux 6.1, perhaps as a backport: a kernel refuses those that it does
/// not know.
#[test]
fn fib_helper_knows_a_table_and_no_neighbour_since_linux_6_5() {
    on_two_interfaces(|helper, network| {
        batch(&default_of_nic1(network, &format!("table {TABLE}")));
        batch(&format!("neigh del {} dev nic1\n", network.router1));
        let is_new = kernel() >= (6, 5);
        let by_table = FibQuestion { table: TABLE, ..of_nic1(network, OUTPUT | DIRECT | TBID, network.world) };
        let without = FibQuestion { flags: by_table.flags | SKIP_NEIGH, ..by_table };
        for (asked, known) in [(by_table, NO_NEIGH), (without, SUCCESS)] {
            match helper.ask(&asked) {
                Err(result) if result == -libc::EINVAL && !is_new => {
                    println!("reduced: this kernel does not know all flags of {:#x}", asked.flags);
                }
                answer => {
                    let answer = answer.map(|answer| (answer.result, answer.ifindex, answer.next_hop));
                    assert_eq!(answer, Ok((known, NIC1, ip(network.router1))), "flags {}", asked.flags);
                }
            }
        }
    });
}

/// The first two numbers of the kernel's version.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's version");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok());
    (numbers.next().expect("a number"), numbers.next().expect("another"))
}
