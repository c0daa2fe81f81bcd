//! ADD and DEL in a pod's namespace: a list of steps, each of which can be taken back. If one fails, those before it are taken
//! back in reverse order, so that the namespace is as it was.
//!
//! Nothing is kept on the node. What DEL needs in a namespace that lives on is in the namespace itself: the former default routes
//! in [`PRIMARY_TABLE`], and former settings in the alias of the interface. A namespace that goes takes everything with it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use egress_cni::{CniError, code, is_interface_name};
use egress_core::model::node::Mac;
use egress_core::model::state::Family;
use egress_datapath::nftables::Nft;
use ipnet::IpNet;

use crate::kernel;
use crate::neighbours::Probe;
use crate::plan::{ALIAS, NewRoute, NewRule, PRIMARY_TABLE, Plan, Route, any, router_table};
use crate::ruleset::{Marks, Ruleset};

/// One change of a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    MakeLink,
    /// Writes former settings where DEL finds them.
    SetAlias,
    /// A setting of the router's interface, which goes with it.
    OwnSetting(String, &'static str),
    /// One of the namespace or of another interface.
    Setting(String, &'static str),
    SetUp,
    /// Asks whether another host has one of the addresses.
    ProbeAddresses,
    AddAddress(IpNet),
    AddRoute(NewRoute),
    AddRule(NewRule),
    KeepRoute(Route),
    DeleteRoute(Route),
    AddTable,
    Announce,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MakeLink => write!(f, "make the interface"),
            Self::SetAlias => write!(f, "note former settings"),
            Self::OwnSetting(path, value) | Self::Setting(path, value) => write!(f, "set {path} to {value}"),
            Self::SetUp => write!(f, "set the interface up"),
            Self::ProbeAddresses => write!(f, "ask for other hosts with the addresses"),
            Self::AddAddress(net) => write!(f, "add address {net}"),
            Self::AddRoute(route) => write!(f, "add route {route} in table {:?}", route.table),
            Self::AddRule(rule) => write!(f, "add rule: {} by table {:?}", rule.selected, rule.table),
            Self::KeepRoute(route) => write!(f, "keep the default route {} for replies", shown(route)),
            Self::DeleteRoute(route) => write!(f, "remove the default route {}", shown(route)),
            Self::AddTable => write!(f, "add the nftables table"),
            Self::Announce => write!(f, "announce the addresses"),
        }
    }
}

fn shown(route: &Route) -> String {
    let gateway = route.gateway.map_or(String::new(), |gateway| format!(" via {gateway}"));
    format!("{}{gateway}", any(route.family))
}

/// How a step is taken back.
enum Undo {
    Link,
    Setting(String, String),
    Rule(NewRule),
    Route(NewRoute),
    KeptRoute(Route),
    DeletedRoute(Route),
    Table,
}

/// The steps of a plan, in order.
pub fn steps(plan: &Plan) -> Vec<Step> {
    let name = &plan.name;
    let own = |path: String, value| Step::OwnSetting(path, value);
    let mut steps = vec![Step::MakeLink, Step::SetAlias];
    let has = |family| plan.gateways.contains_key(&family);
    if has(Family::V4) {
        // A host of the external network gets no answer for addresses of the cluster, nor one by another interface.
        steps.extend([
            own(format!("ipv4/conf/{name}/proxy_arp"), "0"),
            own(format!("ipv4/conf/{name}/arp_ignore"), "1"),
            own(format!("ipv4/conf/{name}/arp_announce"), "2"),
            own(format!("ipv4/conf/{name}/accept_redirects"), "0"),
            own(format!("ipv4/conf/{name}/rp_filter"), "2"),
        ]);
    }
    match has(Family::V6) {
        true => steps.extend([
            own(format!("ipv6/conf/{name}/disable_ipv6"), "0"),
            own(format!("ipv6/conf/{name}/accept_ra"), "0"),
            own(format!("ipv6/conf/{name}/proxy_ndp"), "0"),
            own(format!("ipv6/conf/{name}/accept_redirects"), "0"),
        ]),
        // It would take a prefix and a default route from any router of the external network.
        false => steps.push(own(format!("ipv6/conf/{name}/disable_ipv6"), "1")),
    }
    // The table comes before the namespace forwards and before the interface is up: nothing passes unfiltered.
    steps.push(Step::AddTable);
    steps.extend(settings(plan).into_iter().map(|(path, value)| Step::Setting(path, value)));
    steps.extend([Step::SetUp, Step::ProbeAddresses]);
    steps.extend(plan.addresses.iter().map(|net| Step::AddAddress(*net)));
    steps.extend(plan.replaced.iter().cloned().map(Step::KeepRoute));
    let is_special = |route: &&NewRoute| route.destination.prefix_len() > 0 || route.table != crate::plan::Table::Main;
    steps.extend(plan.routes.iter().filter(is_special).cloned().map(Step::AddRoute));
    steps.extend(plan.rules.iter().copied().map(Step::AddRule));
    steps.extend(plan.replaced.iter().cloned().map(Step::DeleteRoute));
    steps.extend(plan.routes.iter().filter(|route| !is_special(route)).cloned().map(Step::AddRoute));
    steps.push(Step::Announce);
    steps
}

/// Settings that outlive the interface.
fn settings(plan: &Plan) -> Vec<(String, &'static str)> {
    let Some(primary) = &plan.primary else { return Vec::new() };
    let mut all = Vec::new();
    if plan.gateways.contains_key(&Family::V4) {
        all.push(("ipv4/ip_forward".to_owned(), "1"));
        // Clients are in networks whose route may lead by the router; loose, so that their packets are not dropped.
        all.push((format!("ipv4/conf/{}/rp_filter", primary.name), "2"));
    }
    if plan.gateways.contains_key(&Family::V6) {
        all.push(("ipv6/conf/all/forwarding".to_owned(), "1"));
    }
    all
}

/// The setup of one router, by the thread that is in the pod's namespace.
pub struct Setup<'a> {
    plan: &'a Plan,
    /// The node's namespace, where the master is.
    node: BorrowedFd<'a>,
    pod: BorrowedFd<'a>,
    index: u32,
    mac: Mac,
    probe: Option<Probe>,
    undo: Vec<Undo>,
}

impl<'a> Setup<'a> {
    pub fn new(plan: &'a Plan, node: BorrowedFd<'a>, pod: BorrowedFd<'a>) -> Self {
        Self { plan, node, pod, index: 0, mac: Mac::default(), probe: None, undo: Vec::new() }
    }

    /// Performs all steps; `before` is asked before each. Returns the MAC address of the interface.
    ///
    /// # Errors
    /// The step that failed, after those before it have been taken back.
    pub fn perform(mut self, mut before: impl FnMut(&Step) -> io::Result<()>) -> Result<Mac, CniError> {
        for step in steps(self.plan) {
            if let Err(error) = before(&step).map_err(StepError::from).and_then(|()| self.step(&step)) {
                let mut said = error.into_cni(&step);
                for error in self.take_back() {
                    said.details.push_str(&format!("\nnot taken back: {error}"));
                }
                return Err(said);
            }
        }
        Ok(self.mac)
    }

    fn step(&mut self, step: &Step) -> Result<(), StepError> {
        let plan = self.plan;
        match step {
            Step::MakeLink => {
                crate::namespace::enter(self.node)?;
                let made = kernel::make_link(&plan.name, plan.kind, plan.master.index, plan.mtu, self.pod.as_raw_fd());
                crate::namespace::enter(self.pod)?;
                made?;
                self.undo.push(Undo::Link);
                let (link, mac, _) =
                    kernel::link_named(&plan.name)?.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
                (self.index, self.mac) = (link.index, mac);
            }
            Step::SetAlias => {
                let alias = former_settings(plan)?;
                kernel::set_alias(self.index, &alias)?;
            }
            Step::OwnSetting(path, value) => {
                if kernel::read_setting(path)?.is_some() {
                    kernel::write_setting(path, value)?;
                }
            }
            Step::Setting(path, value) => match kernel::read_setting(path)? {
                Some(former) if former != *value => {
                    self.undo.push(Undo::Setting(path.clone(), former));
                    kernel::write_setting(path, value)?;
                }
                _ => {}
            },
            Step::SetUp => kernel::set_up(self.index)?,
            Step::ProbeAddresses => {
                let mut probe = Probe::begin(self.index, self.mac, plan.addresses.iter().map(IpNet::addr))?;
                let found = probe.wait(plan.duplicate_wait)?;
                self.probe = Some(probe);
                if let Some(claim) = found {
                    return Err(StepError::Duplicate(claim));
                }
            }
            Step::AddAddress(net) => kernel::add_address(self.index, *net)?,
            Step::AddRoute(route) => {
                if kernel::add_route(route, self.index)? {
                    self.undo.push(Undo::Route(route.clone()));
                }
            }
            Step::AddRule(rule) => {
                kernel::add_rule(rule, self.index)?;
                self.undo.push(Undo::Rule(*rule));
            }
            Step::KeepRoute(route) => {
                kernel::keep_route(route)?;
                self.undo.push(Undo::KeptRoute(route.clone()));
            }
            Step::DeleteRoute(route) => {
                kernel::delete_route(route, 254)?;
                self.undo.push(Undo::DeletedRoute(route.clone()));
            }
            Step::AddTable => {
                self.undo.push(Undo::Table);
                install(&plan.ruleset, self.index)?;
            }
            Step::Announce => {
                let probe = self.probe.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
                probe.announce()?;
            }
        }
        Ok(())
    }

    fn take_back(&mut self) -> Vec<io::Error> {
        let mut errors = Vec::new();
        while let Some(undo) = self.undo.pop() {
            let outcome = match undo {
                Undo::Link => delete_link_named(&self.plan.name),
                Undo::Setting(path, former) => kernel::write_setting(&path, &former),
                Undo::Rule(rule) => kernel::delete_rule(&rule, self.index),
                Undo::Route(route) => kernel::delete_new_route(&route, self.index),
                Undo::KeptRoute(route) => kernel::delete_route(&route, PRIMARY_TABLE),
                Undo::DeletedRoute(route) => kernel::restore_route(&route),
                Undo::Table => Nft::default().remove_table(Ruleset::table(&self.plan.name)).map(drop),
            };
            errors.extend(outcome.err());
        }
        errors
    }
}

/// By its name: the step that made it may not have learned its index.
fn delete_link_named(name: &str) -> io::Result<()> {
    kernel::link_named(name)?.map_or(Ok(()), |(link, ..)| kernel::delete_link(link.index))
}

/// Why a step failed.
enum StepError {
    Io(io::Error),
    Duplicate(String),
}

impl From<io::Error> for StepError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl StepError {
    fn into_cni(self, step: &Step) -> CniError {
        match self {
            Self::Io(error) => CniError::new(code::IO, format!("cannot {step}: {error}")),
            Self::Duplicate(claim) => CniError::new(code::TRY_AGAIN_LATER, claim),
        }
    }
}

/// Creates the table of a router; without a flow table where the kernel has none.
pub(crate) fn install(ruleset: &Ruleset, index: u32) -> io::Result<()> {
    let (mut nft, marks) = (Nft::default(), Marks { router: router_table(index), primary: PRIMARY_TABLE });
    let mut create = |replaces| match nft.ask(&ruleset.batch(marks, true, replaces)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT | libc::EINVAL)) => {
            nft.ask(&ruleset.batch(marks, false, replaces))
        }
        other => other,
    };
    match create(false) {
        // Left by a call that was killed.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => create(true),
        other => other,
    }
}

/// The alias of the interface: what all routers of the pod will have changed, as it was before the first one.
fn former_settings(plan: &Plan) -> io::Result<String> {
    if let Some(other) = kernel::facts()?.links.into_iter().find(|link| link.alias.starts_with(ALIAS)) {
        return Ok(other.alias);
    }
    let mut alias = ALIAS.to_owned();
    for (path, value) in settings(plan) {
        if let Some(former) = kernel::read_setting(&path)?.filter(|former| former != value) {
            alias.push_str(&format!(" {path}={former}"));
        }
    }
    Ok(alias)
}

/// Takes a router out of its namespace, which lives on. Everything is tried; the first error is returned.
///
/// # Errors
/// What could not be removed.
pub fn tear_down(name: &str) -> io::Result<()> {
    let link = kernel::link_named(name)?.map(|(link, ..)| link);
    // Another interface with this name is none of ours.
    if link.as_ref().is_some_and(|link| !link.alias.starts_with(ALIAS)) {
        return Ok(());
    }
    let index = link.as_ref().map_or(0, |link| link.index);
    let others = kernel::facts()?.links.into_iter();
    let others = others.filter(|other| other.alias.starts_with(ALIAS) && other.index != index);
    let next = others.map(|other| other.index).min();
    let mut errors = Vec::new();
    // After the interface, which without it would be open to hosts outside.
    let remove_table = || Nft::default().remove_table(Ruleset::table(name)).map(drop);
    match link.is_some() {
        true => {
            errors.extend(kernel::delete_rules(Some(index)).err());
            errors.extend(kernel::delete_link_and(index, remove_table).err());
        }
        false => errors.extend(remove_table().err()),
    }
    errors.extend(match next {
        // One that went by itself, as with its master, has taken the former settings with it.
        None => restore(link.map(|link| link.alias).as_deref().unwrap_or(ALIAS)).err(),
        Some(next) => promote(next).err(),
    });
    errors.into_iter().next().map_or(Ok(()), Err)
}

/// Whether it is one that a router changes. A pod that may administer its namespace can write any alias, and a path could lead to
/// a setting of the node.
fn is_setting(path: &str, value: &str) -> bool {
    let is_known = match path.split('/').collect::<Vec<_>>()[..] {
        ["ipv4", "ip_forward"] | ["ipv6", "conf", "all", "forwarding"] => true,
        ["ipv4", "conf", interface, "rp_filter"] => is_interface_name(interface),
        _ => false,
    };
    is_known && matches!(value, "0" | "1" | "2")
}

/// The pod's next router has the default routes that the first one had.
fn promote(next: u32) -> io::Result<()> {
    let present = kernel::default_routes(254)?;
    let is_missing = |route: &&Route| !present.iter().any(|other| other.family == route.family);
    kernel::default_routes(router_table(next))?.iter().filter(is_missing).try_for_each(kernel::restore_route)
}

fn restore(alias: &str) -> io::Result<()> {
    let former = kernel::default_routes(PRIMARY_TABLE)?;
    kernel::delete_own_routes()?;
    former.iter().try_for_each(kernel::restore_route)?;
    kernel::delete_rules(None)?;
    let settings: BTreeMap<&str, &str> = alias.split(' ').skip(1).filter_map(|one| one.split_once('=')).collect();
    settings.into_iter().filter(|(path, value)| is_setting(path, value)).try_for_each(|(path, value)| {
        match kernel::write_setting(path, value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_restores_what_a_router_changes_and_nothing_else() {
        for (path, value) in
            [("ipv4/ip_forward", "0"), ("ipv6/conf/all/forwarding", "1"), ("ipv4/conf/eth0/rp_filter", "2")]
        {
            assert!(is_setting(path, value), "{path}");
        }
        for (path, value) in [
            ("../kernel/core_pattern", "|/bin/sh"),
            ("ipv4/conf/../../../kernel/rp_filter", "1"),
            ("ipv4/conf/../rp_filter", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/ip_forward", "x"),
            ("/etc/passwd", "0"),
            ("", ""),
        ] {
            assert!(!is_setting(path, value), "{path}");
        }
    }
}
