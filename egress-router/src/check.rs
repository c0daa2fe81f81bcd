//! CHECK: whether everything that ADD has set up is still there, the rules that no result lists included.

use std::fs::File;
use std::io;

use egress_core::model::node::mac_text;
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{LinkMessageBuilder, LinkVeth};
use serde_json::Value;

use crate::kernel;
use crate::namespace;
use crate::plan::{ALIAS, NamespaceFacts, Plan, Route};
use crate::ruleset::Ruleset;
use crate::setup::{Step, install, steps};
use crate::table::TableContent;

/// The pod as it was before its router `name` came: what a plan was made from.
pub fn before(mut pod: NamespaceFacts, kept: Vec<Route>, name: &str) -> NamespaceFacts {
    let ours = |alias: &str| alias.starts_with(ALIAS);
    let first = pod.links.iter().filter(|link| ours(&link.alias)).map(|link| (link.index, link.name.clone())).min();
    let is_first = first.is_some_and(|(_, first)| first == name);
    let gone: Vec<u32> = pod
        .links
        .iter()
        .filter(|link| link.name == name || is_first && ours(&link.alias))
        .map(|link| link.index)
        .collect();
    pod.links.retain(|link| !gone.contains(&link.index));
    pod.default_routes.retain(|route| route.interface != 0 && !gone.contains(&route.interface));
    if is_first {
        pod.default_routes.extend(kept);
    }
    pod
}

/// What is missing or different, in words.
#[derive(Debug, Default)]
pub struct Differences {
    /// Of the interface, its addresses, routes and settings.
    pub interface: Vec<String>,
    /// Of the nftables table.
    pub rules: Vec<String>,
}

/// Compares a router with its plan. The calling thread is in the pod's namespace. `previous` is the result of ADD, if it is known.
pub fn differences(plan: &Plan, previous: Option<&Value>, home: &File) -> io::Result<Differences> {
    let Some((link, mac, message)) = kernel::link_named(&plan.name)? else {
        let interface = vec![format!("the interface {} is gone", plan.name)];
        return Ok(Differences { interface, rules: Vec::new() });
    };
    let mut all = Vec::new();
    let mut differs = |what: &str, has: String, should: String| {
        if has != should {
            all.push(format!("{what} is {has} instead of {should}"));
        }
    };
    let (kind, master) = kernel::kind(&message);
    let shown =
        |kind: Option<crate::config::LinkKind>| kind.map_or("of another kind".to_owned(), |kind| kind.to_string());
    differs("the interface", shown(kind), plan.kind.to_string());
    differs("the index of its master", format!("{master:?}"), format!("{:?}", Some(plan.master.index)));
    differs("its MTU", link.mtu.to_string(), plan.mtu.to_string());
    if let Some(should) = previous.and_then(|previous| listed_mac(previous, &plan.name)) {
        differs("its MAC address", mac_text(mac), should.to_ascii_lowercase());
    }
    if !link.alias.starts_with(ALIAS) {
        all.push(format!("the interface has the alias {:?}, which none of a router has", link.alias));
    }
    for net in &plan.addresses {
        if !link.addresses.contains(net) {
            all.push(format!("address {net} is gone"));
        }
    }
    if let Some(previous) = previous {
        let listed = previous["ips"].as_array().into_iter().flatten().filter_map(|one| one["address"].as_str());
        let listed: Vec<&str> = listed.collect();
        let own = plan.addresses.iter().map(ToString::to_string);
        let missing = own.filter(|net| !listed.contains(&net.as_str()));
        all.extend(missing.map(|net| format!("prevResult does not list {net}")));
    }
    for step in steps(plan) {
        let lacks = match &step {
            Step::OwnSetting(path, value) | Step::Setting(path, value) => {
                kernel::read_setting(path)?.is_some_and(|has| has != *value)
            }
            Step::AddRoute(route) => !kernel::has_route(route, link.index)?,
            Step::AddRule(rule) => !kernel::has_rule(rule, link.index)?,
            _ => false,
        };
        if lacks {
            all.push(format!("not any more: {step}"));
        }
    }
    let has = TableContent::of(&Ruleset::table(&plan.name))?;
    Ok(Differences { interface: all, rules: has.differences(&expected(plan, link.index, home)?) })
}

/// The table as the kernel has it right after ADD. A flow table needs its devices, so there are some of their names.
fn expected(plan: &Plan, index: u32, home: &File) -> io::Result<TableContent> {
    let pod = namespace::own()?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    let made = (|| {
        if let Some(primary) = &plan.primary {
            let pair = LinkMessageBuilder::<LinkVeth>::new(&plan.name, &primary.name).build();
            kernel::make(pair)?;
        }
        install(&plan.ruleset, index)?;
        TableContent::of(&Ruleset::table(&plan.name))
    })();
    namespace::enter(std::os::fd::AsFd::as_fd(&pod)).or_else(|_| namespace::enter(std::os::fd::AsFd::as_fd(home)))?;
    made
}

fn listed_mac<'a>(previous: &'a Value, name: &str) -> Option<&'a str> {
    let interfaces = previous["interfaces"].as_array()?;
    let with_sandbox = interfaces
        .iter()
        .find(|one| one["name"] == name && one["sandbox"].as_str().is_some_and(|path| !path.is_empty()));
    with_sandbox?["mac"].as_str()
}
