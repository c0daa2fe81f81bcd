//! The configuration of an egress router: any bytes on standard input, and any entries of its lists.
//!
//! The first byte says which. A configuration that is accepted can be planned for a pod without a panic, and the plan keeps what
//! administrators rely on; an entry means the same however it is written.

use egress_cni::NetworkConfiguration;
use egress_core::model::state::{Family, family_of};
use egress_router::config::destinations::{Allowed, Redirects};
use egress_router::config::source::Source;
use egress_router::config::{PodName, RouterConfig};
use egress_router::plan::{By, LinkFacts, NamespaceFacts, Table, plan};
use egress_router::ruleset::Marks;
use egress_router::setup::steps;

const POD: PodName<'static> = PodName { namespace: Some("shop"), name: Some("web-1") };

const MARKS: Marks = Marks { router: 1, primary: 2 };

/// Reads, and checks what was read.
pub fn router(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match first % 2 {
        0 => configuration(&text),
        _ => text.lines().for_each(entry),
    }
}

fn configuration(text: &str) {
    let Ok(configuration) = NetworkConfiguration::of(text) else { return };
    let Ok(config) = RouterConfig::of(&configuration.fields, POD) else { return };
    let Source::Given(addressing) = &config.source else { return };
    let Ok(plan) = plan(&config, addressing, "net1", (&node(), &pod())) else { return };
    assert!(!plan.addresses.is_empty(), "a router without an address");
    for net in &plan.addresses {
        assert!(plan.gateways.contains_key(&family_of(net.addr())), "{net} has no gateway");
    }
    for target in addressing.redirects.targets() {
        assert!(plan.gateways.contains_key(&family_of(target)), "{target} is of a family without a gateway");
        assert!(!config.cluster_networks.iter().any(|net| net.contains(&target)), "{target} is in the cluster");
    }
    // Either family leaves by the router or not at all: its former default routes go, and others come.
    for family in [Family::V4, Family::V6] {
        let mut new = plan.routes.iter().filter(|route| {
            route.table == Table::Main
                && route.destination.prefix_len() == 0
                && family_of(route.destination.addr()) == family
        });
        let wanted = if plan.gateways.contains_key(&family) { By::Router } else { By::Nowhere };
        assert!(
            new.next().is_some_and(|route| route.by == wanted) && new.next().is_none(),
            "{family:?}: its default route"
        );
        assert!(plan.replaced.iter().any(|route| route.family == family), "{family:?}: its former default route");
    }
    assert!(steps(&plan).iter().all(|step| !step.to_string().is_empty()));
    for has_flowtables in [false, true] {
        let _messages = plan.ruleset.batch(MARKS, has_flowtables, false);
    }
}

fn entry(line: &str) {
    let spaced = line.split_whitespace().collect::<Vec<_>>().join("  \t ");
    let mut redirects = Redirects::default();
    let outcome = redirects.add(line);
    let mut again = Redirects::default();
    for same in [format!(" {spaced} "), spaced.to_uppercase()] {
        let same_outcome = again.add(&same);
        assert_eq!(outcome.is_ok(), same_outcome.is_ok(), "{line:?} and {same:?}");
        assert_eq!(redirects, again, "{line:?} and {same:?}");
        again = Redirects::default();
    }
    if outcome.is_ok() && !redirects.is_empty() {
        assert!(redirects.clone().add(line).is_err(), "{line:?} twice");
        assert!(
            redirects
                .ports
                .iter()
                .all(|((family, _, port), to)| { *port > 0 && to.port() > 0 && family_of(to.ip()) == *family })
        );
    }
    if let Ok(Some(allowed)) = Allowed::of(line) {
        assert_eq!(Allowed::of(&allowed.to_string()), Ok(Some(allowed.clone())), "{line:?}");
        assert_eq!(allowed.and(&allowed), Some(allowed.clone()), "{line:?}");
    }
}

/// A node with the network of usual addresses, and its default routes.
fn node() -> NamespaceFacts {
    namespace("eno1", &["192.168.12.2/24", "2001:db8:12::2/64"], ["192.168.12.1", "2001:db8:12::1"])
}

fn pod() -> NamespaceFacts {
    namespace("eth0", &["10.128.6.47/23", "fd01::47/64"], ["10.128.6.1", "fd01::1"])
}

fn namespace(name: &str, addresses: &[&str], gateways: [&str; 2]) -> NamespaceFacts {
    let addresses = addresses.iter().filter_map(|text| text.parse().ok()).collect();
    let link = LinkFacts { index: 2, name: name.to_owned(), mtu: 1500, addresses, ..LinkFacts::default() };
    let route = |gateway: &str| {
        let gateway = gateway.parse().ok()?;
        Some(egress_router::plan::Route {
            family: family_of(gateway),
            gateway: Some(gateway),
            interface: link.index,
            metric: 0,
            message: Default::default(),
        })
    };
    let default_routes = gateways.into_iter().filter_map(route).collect();
    NamespaceFacts { links: vec![link], default_routes, networks: Vec::new() }
}
