//! `egress-router check-host`: tries everything that a router needs, in a network namespace of its own.

use std::io;

use crate::config::{LinkKind, MacvlanMode};
use crate::{kernel, namespace};
use egress_datapath::nftables::Nft;
use egress_datapath::nftables::message::{NEW_TABLE, NftBatch};
use nix::sched::{CloneFlags, unshare};
use rtnetlink::packet_core::NLM_F_CREATE;
use rtnetlink::{LinkMessageBuilder, LinkVeth};

/// A name that nothing else has in a new namespace.
const MASTER: &str = "master";

pub(super) fn run() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|error| match error {
        nix::errno::Errno::EPERM => "run this as root: it makes a network namespace".to_owned(),
        other => format!("cannot make a network namespace: {other}"),
    })?;
    let pair = LinkMessageBuilder::<LinkVeth>::new(MASTER, "peer").build();
    kernel::make(pair).map_err(|error| format!("cannot make a veth pair to try with: {error}"))?;
    let all = [
        ("macvlan", "interfaceType macvlan", link("mv", LinkKind::Macvlan(MacvlanMode::Bridge))),
        ("ipvlan", "interfaceType ipvlan", link("iv", LinkKind::Ipvlan)),
        ("nftables", "every router", table(false)),
        ("flow tables", "faster forwarding of established connections", table(true)),
        ("IPv6", "addresses of IPv6", ipv6()),
    ];
    for (what, needed_for, outcome) in &all {
        match outcome {
            Ok(()) => println!("{what:<12} yes"),
            Err(error) => println!("{what:<12} no: {error}; needed for {needed_for}"),
        }
    }
    let has = |wanted: &str| all.iter().any(|(what, _, outcome)| *what == wanted && outcome.is_ok());
    match has("nftables") && (has("macvlan") || has("ipvlan")) {
        true => Ok(()),
        false => Err("routers cannot run on this node".to_owned()),
    }
}

/// Asks for the module too.
fn link(name: &str, kind: LinkKind) -> io::Result<()> {
    let master = kernel::link_named(MASTER)?.ok_or(io::ErrorKind::NotFound)?.0;
    let own = namespace::own()?;
    kernel::make_link(name, kind, master.index, master.mtu, std::os::fd::AsRawFd::as_raw_fd(&own))
}

fn table(with_flows: bool) -> io::Result<()> {
    let mut batch = NftBatch::begin("egress-router-check");
    batch.table(NEW_TABLE, NLM_F_CREATE);
    if with_flows {
        batch.flowtable("fast", &[MASTER, "peer"]);
    }
    Nft::default().ask(&batch.ended())
}

fn ipv6() -> io::Result<()> {
    match kernel::read_setting("ipv6/conf/all/forwarding")? {
        Some(_) => Ok(()),
        None => Err(io::Error::other("the kernel has none")),
    }
}
