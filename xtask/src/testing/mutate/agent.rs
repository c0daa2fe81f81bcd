//! Mutations of the agent's user space: who is served, in which order the kernel is changed, who may hold an address, who gets
//! it, and what is said of it. The tests are those of the libraries of `crates/` and of egress-agent, and need no kernel.

use super::table::{Mutation, mutations};

const SELECTION: &str = "crates/core/src/selection/mod.rs";
const POD_ADDRESSES: &str = "crates/core/src/selection/pod_addresses/mod.rs";
const POLICY: &str = "crates/core/src/model/policy.rs";
const VIEW: &str = "crates/core/src/model/view.rs";
const DESIRED: &str = "crates/core/src/plan/desired/mod.rs";
const EXPOSED: &str = "crates/core/src/model/exposed.rs";
const RESERVED: &str = "crates/core/src/model/reserved.rs";
const CAPACITY: &str = "crates/core/src/plan/capacity.rs";
const REFUSAL: &str = "crates/core/src/plan/refusal.rs";
const COMPILE: &str = "crates/core/src/plan/compile.rs";
const SERVICES: &str = "crates/core/src/model/services.rs";
const PLAN: &str = "crates/core/src/plan/mod.rs";
const STATE: &str = "crates/core/src/model/state.rs";
const KERNEL_HANDOVERS: &str = "crates/core/src/ownership/kernel_handovers.rs";
const EXECUTOR: &str = "crates/core/src/plan/executor.rs";
const NODE_OWNERSHIP: &str = "crates/core/src/ownership/node_ownership/mod.rs";
const RECONCILE: &str = "egress-agent/src/node/reconciler/mod.rs";
const ATTACHED: &str = "egress-agent/src/node/reconciler/attached_pods.rs";
const BACKGROUND_FLUSH: &str = "egress-agent/src/node/reconciler/background_flush.rs";
const RELEASE: &str = "egress-agent/src/node/reconciler/release.rs";
const EXECUTE: &str = "egress-agent/src/node/reconciler/execute.rs";
const LEASE: &str = "crates/core/src/ownership/lease/mod.rs";
const SIGNATURE: &str = "egress-agent/src/health/signature.rs";
const LEADER_CONTACT: &str = "egress-agent/src/health/leader_contact.rs";
const ELECTION: &str = "crates/core/src/leader_election.rs";
const NODE_HEALTH: &str = "crates/core/src/node_health/state/mod.rs";
const LEADERSHIP: &str = "crates/kube/src/leader_election/mod.rs";
const SUSPICION: &str = "crates/core/src/ownership/suspicion.rs";
const ALLOCATION: &str = "crates/core/src/allocation/mod.rs";
const HOSTS: &str = "crates/core/src/allocation/hosts.rs";
const MATCHING: &str = "crates/core/src/allocation/matching.rs";
const OBJECT_ASSIGNMENT: &str = "crates/core/src/allocation/object_assignment.rs";
const CLAIMANTS: &str = "crates/core/src/allocation/claimants.rs";
const HANDOVER: &str = "crates/core/src/ownership/handover/mod.rs";
const CONTROLLER_LEDGER: &str = "egress-agent/src/controller/ledger.rs";
const EGRESS_IDS: &str = "crates/core/src/allocation/egress_ids.rs";
const DRAINING: &str = "crates/core/src/allocation/draining.rs";
const DESIRED_STATUS: &str = "crates/core/src/desired_status.rs";
const CONDITIONS: &str = "crates/core/src/status/conditions.rs";
const POD_COUNT_REQUESTS: &str = "egress-agent/src/controller/pod_counts.rs";
const POD_COUNTS: &str = "crates/core/src/status/pod_counts.rs";
const MOVES: &str = "crates/core/src/status/moves.rs";
const PROBLEMS: &str = "crates/core/src/status/node_problems.rs";
const STATUS: &str = "crates/kube/src/policy/egress_ip/write.rs";

mutations! { AGENT,
    // Until when programs emit.
    "dead-agent-counts-as-a-silent-node", SUSPICION, ["ownership::suspicion::"],
        "programs whose agent is gone emit what another node has been given":
        "false => (programs.max(lease), lease * 7 / 4)," => "false => (lease, lease * 3 / 4),";
    "passed-deadline-renewed-at-once", LEASE, ["ownership::lease::"],
        "an agent that comes back has its programs emit what has been given away":
        "!is_confirmed || self.demand.acknowledged_expiry != self.expiries" => "!is_confirmed";
    "grace-behind-a-reading", LEASE, ["ownership::lease::"], "programs emit for longer than the leader waits":
        "self.read.map(|read| read + self.total * 16 / 10)" => "self.read.map(|read| read + self.programs())";
    "endless-by-a-late-watch", LEASE, ["ownership::lease::"], "a lease that has an end again has none":
        "self.endless = terms.endless.filter(|number| *number > self.ended_up_to);" => "self.endless = terms.endless;";
    "endless-lease-given-away", CONTROLLER_LEDGER, ["controller::ledger::"], "programs emit without an end what another node has been given":
        "lease_expiries.retain(|node, _| !endless.contains(node))" => "lease_expiries.retain(|node, _| !endless.contains(node) || true)";
    // Which object serves a pod.
    "youngest-object-serves", SELECTION, ["plan::desired::"], "a new object takes the pods of those that were there before":
        "policies.sort_by(|a, b| a.rank().cmp(&b.rank()));" => "policies.sort_by(|a, b| b.rank().cmp(&a.rank()));";
    "number-of-two-objects", SELECTION, ["allocation::egress_ids::"], "pods of two objects leave with each other's addresses":
        "policy.published.ids.retained(|id| taken.insert(id))" =>
        "policy.published.ids.retained(|id| taken.insert(id) || taken.contains(&id))";
    "older-without-address-takes-pods", SELECTION, ["plan::desired::"],
        "an old object with a typing error drops pods of others":
        "known(policy) == Some(true);" => "known(policy).is_some();";
    "outage-gives-pods-to-another-object", SELECTION, ["plan::desired::"],
        "pods change their address while their node is away":
        "policy.has_assigned() || known(policy) == Some(true)" => "policy.has_assigned()";
    "unknown-namespace-has-no-labels", SELECTION, ["plan::desired::"],
        "a pod leaves with its node's address until its namespace is known":
        "let labels = view.namespaces.get(&key.namespace)?;" =>
        "let none = Default::default();\n        let labels = view.namespaces.get(&key.namespace).unwrap_or(&none);";
    "unreadable-selector-selects-no-pod", SELECTION, ["plan::desired::", "node::reconciler::tests::"],
        "a typing error in a selector lets all pods of its object out with their node's address":
        "None => known(&one.policy).is_some()," => "None => false,";
    "second-compilation-forgets-who-served", SELECTION, ["plan::desired::"],
        "while a node is away its pods change their address at the next change of any namespace":
        "(id, had(&id) || can_serve(self, id))" => "(id, can_serve(self, id))";
    "pods-of-events-not-remembered", COMPILE, ["plan::desired::"],
        "what a deleted pod still sends leaves with the node's address, if it came since the agent began":
        "self.view.remember_one(self.selection.network(), *address, desired);" => "";
    "ended-pod-passes", VIEW, ["plan::desired::"],
        "what waits in the sockets of a pod that has ended leaves with the node's address":
        "new.uid == pod.uid && new.is_endpoint()" => "new.uid == pod.uid";
    "departed-forgotten-at-the-start", SELECTION, ["plan::desired::"],
        "what a deleted pod still sends leaves with the node's address once an agent is started":
        "None => departed.push(*address)," => "None => {}";
    "namesake-inherits", POLICY, ["plan::desired::"], "an object that is created again selects what its former one did":
        "if known.origin.uid != self.origin.uid {" => "if known.origin.key != self.origin.key {";

    // Which pod has an address.
    "announced-before-reported", POD_ADDRESSES, ["selection::pod_addresses::"],
        "who writes a pod chooses by which address it is known":
        "} else if !pod.reported.is_empty() {" => "} else if !pod.reported.is_empty() && pod.announced.is_empty() {";
    "terminating-pod-keeps-its-address", POD_ADDRESSES, ["selection::pod_addresses::"],
        "a new pod is served as the one that had its address before":
        "(*source, pod.terminating, pod.created, *key)" => "(*source, pod.created, *key)";
    "contested-announcement-believed", POD_ADDRESSES, ["selection::pod_addresses::"],
        "who writes a pod takes the address of another that starts":
        "Source::Announced if !others.is_empty() =>" => "Source::Announced if others.len() > 1 =>";
    "pod-has-an-egress-ip", POD_ADDRESSES, ["selection::pod_addresses::"], "a pod's annotation makes an egress IP a pod's address":
        "} else if is_egress_ip {" => "} else if is_egress_ip && !is_known {";

    // What the maps should hold.
    "exception-outlives-an-edit", DESIRED, ["plan::desired::"],
        "pods leave with their node's address after an edit that gave their object another":
        "is_some_and(|judged| *judged == policy.addresses())" => "is_some()";
    "unreadable-addresses-let-pods-out", DESIRED, ["plan::desired::"],
        "a typing error in an object lets its pods out with their node's address":
        "!policy.is_unknown(PolicyPart::Addresses) && " => "";
    "two-addresses-of-an-object-on-a-node", DESIRED, ["plan::desired::"],
        "pods are sent to an address that no node owns, after a foreign write to a status":
        "!claimed.contains_key(address) && nodes.insert((*node, id))" =>
        "!claimed.contains_key(address) && (nodes.insert((*node, id)) || nodes.contains(&(*node, id)))";
    "address-of-another-object-waited-for", DESIRED, ["plan::desired::"],
        "connections go on with an address that another object has by now":
        "entry.pending.retain(|address| claimed.get(address).is_none_or(|holder| *holder == Some(*id)));" =>
        "entry.pending.retain(|_| true);";
    "mixed-objects-have-no-destinations", DESIRED, ["plan::desired::"],
        "flows of an object with addresses in several networks go to a network without their destination":
        "entry.destinations = destinations::of_policy(view, served.chain(waiting));" =>
        "let _ = destinations::of_policy(view, served.chain(waiting));";
    "service-address-is-an-egress-ip", DESIRED, ["plan::desired::"],
        "clients of a Service get no answers from its pods":
        "AddressUse::OfService => PrefixKind::Service," => "AddressUse::OfService => PrefixKind::EgressIp,";
    "nodes-own-address-served", DESIRED, ["plan::desired::"],
        "pods are steered to an address that is a node's own, and dropped there":
        "false => !nodes_own.contains_key(address)," => "false => true,";
    "lost-address-of-the-host-served", DESIRED, ["plan::desired::"],
        "a node sends with an address that another host has by now":
        "true => node != settings.node_name || own.has(*address)," => "true => !node.is_empty(),";
    "service-exposes-every-pod", EXPOSED, ["model::exposed::"],
        "a pod's datagrams from a port of some Service leave with the pod's own address":
        ".filter(|exposes| exposes.selects(pod))" => "";
    "node-reserves-what-is-not-its-own", RESERVED, ["model::reserved::"],
        "one node's word about its routes takes any address from all objects":
        "node.uplink.next_hops.iter().filter(|hop| node.may_host(**hop))" => "node.uplink.next_hops.iter()";
    "chosen-before-given", CAPACITY, ["plan::capacity::"], "who makes namespaces takes the room of others' cluster IPs":
        "for by_namespace in [given, chosen] {" => "for by_namespace in [chosen, given] {";
    "policy-of-a-hand-over-spared", CAPACITY, ["plan::capacity::"],
        "an agent that restarts during a hand-over cuts the flows that its node has taken over":
        "asked.extend(state.owned.keys().chain(state.handovers.keys()));" => "asked.extend(state.owned.keys());";
    "new-service-address-not-entered", SERVICES, ["node::reconciler::tests::", "plan::desired::"],
        "pods call a load balancer by their egress IP, and not through the service proxy":
        "old.addresses.symmetric_difference(&addresses)" => "old.addresses.difference(&addresses)";

    // Entries that the kernel refuses.
    "refused-pod-leaks", REFUSAL, ["node::reconciler::tests::refused::"],
        "a pod whose entry does not fit leaves with its node's address":
        "pod.is_selected() && state.on_unknown_pod" => "!pod.is_selected() && state.on_unknown_pod";
    "refused-pod-passes-while-followed", REFUSAL, ["node::reconciler::tests::refused::"],
        "a pod whose entry does not fit leaves with its node's address, as most clusters are set up":
        "Action::SetUnknownPods(OnUnknownPod::Pass | OnUnknownPod::PassWhileFollowed) =>" =>
        "Action::SetUnknownPods(OnUnknownPod::Pass) =>";
    "refused-policy-keeps-flows", REFUSAL, ["node::reconciler::tests::refused::"],
        "connections go on with an address that was taken from their object":
        "vec![Action::RemovePolicy(*id, *family), Action::CutFlows(*id, addresses)]" =>
        "vec![Action::RemovePolicy(*id, *family)]";
    "one-entry-stops-all", EXECUTOR, ["node::reconciler::tests::refused::"],
        "an entry that the kernel does not take keeps its node from serving anything":
        "Self::Full { .. } | Self::Refused { .. } => true,\n            Self::Kernel { .. }" =>
        "Self::Full { .. } => true,\n            Self::Refused { .. } | Self::Kernel { .. }";

    // The order of a plan.
    "used-before-it-is-claimed", PLAN, ["plan::"],
        "packets are dropped by a gateway that has the address only a moment later":
        "plan.own_rest();\n    plan.put_classes();\n    plan.park_pods();\n    plan.put_policies();" =>
        "plan.put_classes();\n    plan.park_pods();\n    plan.put_policies();\n    plan.own_rest();";
    "claimed-before-it-is-given-up", PLAN, ["plan::"], "two objects own an address on one node at the same time":
        "!self.state.owned.contains_key(id) && !taken.contains(address)" => "!self.state.owned.contains_key(id)";
    "leaving-pods-not-parked", PLAN, ["plan::"],
        "a pod that has left an object sends with an address that this gets just then":
        "    plan.park_pods();\n" => "";
    "lost-addresses-uncut", PLAN, ["plan::"], "connections go on with an address that their object has no more":
        "policy.clone()));\n                self.cut_lost(*id, *family);" => "policy.clone()));";
    "nothing-cut-behind-a-claim", PLAN, ["plan::"],
        "what other nodes began until the claim ended goes on with an address that is given up":
        "self.cut.remove(&(id, family_of(address)));\n" => "\n";
    "shortest-prefix-first", PLAN, ["plan::"], "for a moment packets for a node's pods are taken for something else":
        "std::cmp::Reverse(prefix.prefix_len())" => "prefix.prefix_len()";
    "pod-entry-goes-before-its-cut", PLAN, ["plan::"],
        "a cut that failed is never made up for, and the next pod with the address inherits flows":
        "[Action::CutPod(address), Action::RemovePod(address)]" => "[Action::RemovePod(address), Action::CutPod(address)]";
    "owner-noted-before-the-cut", PLAN, ["plan::"],
        "a pod inherits the connections of the one that had its address before, where a cut fails":
        "} else if self.cuts.contains_key(&address) {" =>
        "} else if self.cuts.contains_key(&address) && !matches!(action, Action::PutOwner(..)) {";
    "exception-is-no-gain", PLAN, ["plan::"], "a pod that leaves an object sends with its node's address for a moment":
        " || (leaks(new) && !leaks(old))" => "";
    "known-pods-wait-for-the-rest", PLAN, ["plan::"], "pods that nothing selects are dropped while an agent begins":
        "plan.introduce_pods();\n    plan.unknown_pods(OnUnknownPod::Drop);" =>
        "plan.unknown_pods(OnUnknownPod::Drop);\n    plan.introduce_pods();";
    "unknown-pods-pass-first", PLAN, ["plan::"],
        "selected pods leave with their node's address until a new agent has come to their entries":
        "plan.unknown_pods(OnUnknownPod::Drop);" =>
        "plan.unknown_pods(OnUnknownPod::Drop);\n    plan.unknown_pods(OnUnknownPod::PassWhileFollowed);";

    // Hand-overs on a node.
    "claim-outlives-the-hand-over", STATE, ["node::reconciler::tests::handover::"],
        "a node that has handed an address over still counts as its owner, and reports no release":
        "if handover.stage == HandoverStage::Leaving {" => "if handover.stage != HandoverStage::Leaving {";
    "ready-for-another-hand-over", KERNEL_HANDOVERS, ["node::reconciler::tests::handover::"],
        "an address is handed over to a node that is not ready for it":
        "*number == record.number && *from == record.from" => "*from == record.from";
    "new-owner-opens-unnamed", KERNEL_HANDOVERS, ["node::reconciler::tests::handover::"], "two nodes send with one address":
        "from.released.get(address) == Some(&record.number) && to == Some(ownership.node_name())" =>
        "from.released.get(address) == Some(&record.number) || to == Some(ownership.node_name())";
    "new-owner-with-another-address", KERNEL_HANDOVERS, ["node::reconciler::tests::handover::"],
        "what a node is handing over is dropped when another address of the object comes to it":
        "if is_free(desired) && is_free(actual) && moves(id) {" => "if is_free(desired) && moves(id) {";

    // How a node brings its kernel there.
    "goes-on-without-its-claim", EXECUTE, ["node::reconciler::tests::"],
        "pods are steered to a gateway that could not claim the address":
        "if !failed.is_empty() && !matches!" => "if failed.len() > 1 && !matches!";
    "orphans-left", RECONCILE, ["node::reconciler::tests::"],
        "what an agent did not come to cut before it was killed goes on for ever":
        "self.act(&Action::CutOrphans).await?;" => "";
    "plan-does-not-wait-for-cuts", RECONCILE, ["node::reconciler::tests::background_flush::"],
        "a cut that is under way takes what a plan of the whole has just permitted":
        "whole || touched == Some(Touched::Everything)" => "whole";
    "given-up-behind-a-walk", RELEASE, ["node::reconciler::tests::"],
        "an address is held for as long as a walk of the maps takes after its lease has run out":
        "plan.sort_by_key(|action| !matches!(action, Action::Disown(..)));" => "";
    "cut-of-who-is-selected-again", BACKGROUND_FLUSH, ["node::reconciler::tests::background_flush::"],
        "a pod that is deselected for a moment loses its connections":
        "self.waiting.spare(address, id);" => "";
    "next-pod-before-a-cut-that-waits", BACKGROUND_FLUSH, ["node::reconciler::tests::background_flush::"],
        "the next pod with an address loses its entry and connections to the cut of the former one":
        "if is_walked || self.waiting.keeps(address, &ids) {" => "if is_walked {";
    "next-pod-before-a-walk-is-over", BACKGROUND_FLUSH, ["node::reconciler::tests::background_flush::"],
        "the next pod with an address loses its entry behind the walk that cuts the former one":
        "self.whole.contains(&address) || wanted.iter()" => "wanted.iter()";
    "failed-cut-forgotten", BACKGROUND_FLUSH, ["node::reconciler::tests::"], "connections go on with a wrong address after one error":
        "outcome?;" => "drop(outcome);";
    "pod-starts-before-it-is-known", ATTACHED, ["node::reconciler::tests::"],
        "a pod's first packets are dropped, or leave with its node's address":
        "Some(Ok(())) if self.is_written(&attach) =>" => "Some(Ok(())) =>";

    // How long a node may hold an address.
    "reading-lasts-as-long-as-hearing", LEASE, ["ownership::lease::tests::"],
        "a node that is cut off holds its addresses when they are given to another":
        "read + self.total * 6 / 10" => "read + self.total";
    "longer-timeout-counts", LEASE, ["ownership::lease::tests::"],
        "a node holds its addresses by a former leader's timeout when they are given to another":
        "leaders.min().unwrap_or(self.own_total)" => "leaders.max().unwrap_or(self.own_total)";
    "heard-before-a-pause", LEASE, ["ownership::lease::tests::"],
        "a node whose agent was stopped for a moment gives up all addresses without asking":
        "if as_of >= self.started {" => "if true {";
    "suspected-and-undecided", LEASE, ["ownership::lease::tests::"],
        "an agent that restarts on a suspected node holds what another node gets":
        "now < self.started + self.total && !self.is_denied" => "now < self.started + self.total";
    "probe-counts-twice", SIGNATURE, ["health::signature::"], "a copy of a probe makes a node obey an order that is over":
        "if number <= *greatest => return false" => "if number < *greatest => return false";
    "forgotten-session-comes-again", SIGNATURE, ["health::signature::"],
        "a copy of a former leader's probe counts when its session is forgotten":
        "self.forgotten.max(latest + 1)" => "self.forgotten.max(latest)";
    "answer-to-any-request", SIGNATURE, ["health::signature::"], "an old answer makes the leader believe that a node is well":
        "node.as_bytes(), to.0.as_ref()]" => "node.as_bytes()]";
    "heard-as-of-now", LEADER_CONTACT, ["health::leader_contact::"],
        "a node counts its lease from later than the leader does, and holds what is given to another":
        "self.confirmed = self.confirmed.max(Some(*arrived));" => "self.confirmed = self.confirmed.max(Some(at));";
    "expired-lease-releases-nothing", NODE_OWNERSHIP, ["ownership::node_ownership::"], "a node that is cut off goes on with addresses that another has by now":
        "if self.lease_expired || is_for_another {" => "if is_for_another {";
    "status-of-before-the-expiry", NODE_OWNERSHIP, ["ownership::node_ownership::"], "a node takes an address by a status of before it was cut off":
        " || (self.has_expired_before && is_new)" => "";
    "unclaimed-counts-as-read", NODE_OWNERSHIP, ["ownership::node_ownership::"],
        "a node takes an address by what it read before a claim that failed":
        "if held.values().any(|other| *other == address) {" => "if true {";
    "hand-over-outlives-the-lease", NODE_OWNERSHIP, ["node::reconciler::tests::handover::"],
        "a node that was cut off sends with an address that went to a third one":
        " && number > self.expired_up_to" => "";
    "reading-outlives-an-order", NODE_OWNERSHIP, ["ownership::node_ownership::"],
        "after an error of the kernel a node takes an address again that it was ordered to release":
        "self.confirmed.retain(|address| !leaving.contains_key(address));" => "";
    "withheld-with-the-nodes-address", NODE_OWNERSHIP, ["node::reconciler::tests::refused::"],
        "pods leave with their node's address while a claim fails":
        "policy.when_empty = WhenEmpty::Drop;" => "";

    // Who leads.
    "leads-until-others-may", ELECTION, ["leader_election::"], "two leaders write at the same time":
        "let until = renewed + self.timing.renew_deadline;" => "let until = renewed + self.timing.duration;";
    "replaced-while-it-renews", ELECTION, ["leader_election::"], "a leader that one standby does not reach is replaced, again and again":
        "silent.filter(|_| now >= since + self.timing.stale_renewal)" => "silent";
    "anothers-silence", ELECTION, ["leader_election::"], "a leader is replaced since its predecessor's node was silent":
        "silent_holder.holder == lease.holder && now" => "now";
    "early-and-unnoticed", ELECTION, ["leader_election::"], "a leader that took over early does not wait for what its former may confirm":
        "until: since + duration" => "until: since";
    "reign-from-the-answer", ELECTION, ["leader_election::"],
        "a leader with a slow API server leads on when another has begun":
        "self.renewed = Some(asked);" => "self.renewed = Some(now);";
    "renewal-unseen", ELECTION, ["leader_election::"], "agents take the Lease from a leader that renews it":
        "is_none_or(|(record, _)| *record != lease)" => "is_none_or(|(record, _)| record.holder != lease.holder)";
    "deleted-lease-taken-at-once", ELECTION, ["leader_election::"], "two controllers lead after the Lease was deleted":
        "if now < since + self.timing.lease_duration {" => "if now < since {";
    "gap-unseen", ELECTION, ["leader_election::"], "a leader goes on with what it has seen before another led":
        "if self.term(now).is_none() {" => "if self.since.is_none() {";
    "leads-without-looking", LEADERSHIP, ["leader_election::"],
        "an agent that did not run for a while writes when another leads":
        ".filter(|term| Instant::now() < term.until)" => ".filter(|_| true)";
    "former-leader-vouches-for-ever", LEADERSHIP, ["leader_election::"],
        "nodes hold addresses by a former leader's word when the next gives them away":
        "is_some_and(|at| at.elapsed() < UNKNOWN_LEADER_FOR)" => "is_some()";
    "lease-without-margin", SUSPICION, ["ownership::suspicion::"],
        "an address is given away before the node that had it has fallen silent":
        "(last_confirmed + after_answer + MARGIN).max(" => "(last_confirmed + after_answer).max(";
    "suspicion-not-waited-for", SUSPICION, ["ownership::suspicion::"],
        "an address is given away while its node holds it by a ledger that it read before":
        "(last_confirmed + after_answer + MARGIN).max(*first_seen + after_suspicion)" => "(last_confirmed + after_answer + MARGIN).min(*first_seen + after_suspicion)";

    // Which node gets an address.
    "two-of-an-object-on-a-node", ALLOCATION, ["allocation::"],
        "a node is given two addresses of an object, and serves one":
        "else { !used.contains(node) };" => "else { true };";
    "addresses-of-a-service-on-two-nodes", ALLOCATION, ["allocation::"],
        "clients of a Service arrive at a node by which its pods do not answer":
        "if claim.is_one() { used.iter().all(|used| used == node) }" => "if claim.is_one() { true }";
    "service-moves-one-address", ALLOCATION, ["allocation::"],
        "one family of a Service's pods has no node after a failover":
        "places[unit.policy].extend(others.map(|address| (*address, node)));" => "drop(others);";
    "service-takes-an-address", ALLOCATION, ["allocation::"],
        "an object loses the address that its pods use when a Service gets it":
        "services.retain(|address| !shown.contains(address) && !shared.contains(address));" =>
        "services.retain(|address| !shared.contains(address));";
    "service-address-not-for-its-pods", ALLOCATION, ["allocation::"],
        "no EgressService is served":
        "services.retain(|address| !shown.contains(address) && !shared.contains(address));" =>
        "services.retain(|address| !shown.contains(address));";
    "surplus-takes-what-is-served", ALLOCATION, ["allocation::"],
        "an object that lists too many addresses loses those that its pods use":
        "addresses.sort_by_key(|address| !items.iter()" => "addresses.sort_by_key(|address| items.iter()";
    "drained-hand-over-starts-again", ALLOCATION, ["allocation::"],
        "an address that leaves a drained node changes its new one again and again":
        ".filter(|item| !is_given_away(item))" => "";
    "lister-before-the-holder", CLAIMANTS, ["allocation::"],
        "an object loses its address to an older one while its node is away":
        "away.into_iter().chain(listing)" => "listing.chain(away)";
    "absent-agent-gets-more", HOSTS, ["allocation::"], "addresses are given to a node without an agent":
        "node.drained || inputs.absent.contains(name)" => "node.drained";
    "one-more-than-the-cloud-allows", MATCHING, ["allocation::"], "a cloud drops what leaves with the address":
        "|limit| self.load < limit" => "|limit| self.load <= limit";
    "one-hopeless-address-lets-pods-out", OBJECT_ASSIGNMENT, ["allocation::"],
        "pods leave with their node's address though a node could have one of their object's":
        "self.entries.iter().all(|(_, status)| *status == EntryStatus::NoNode)" =>
        "self.entries.iter().any(|(_, status)| *status == EntryStatus::NoNode)";
    "freed-number-comes-next", EGRESS_IDS, ["allocation::egress_ids::"],
        "a new object has the number that maps know as a deleted one's":
        "self.last = id;\n        Some(EgressId(id))" => "Some(EgressId(id))";
    "drain-waits-for-what-goes", DRAINING, ["allocation::draining::"],
        "the command says of addresses that they stay, and they go":
        "parse_egress_ip(entry).filter(|_| is_here)" => "parse_egress_ip(entry)";

    // When it gets it.
    "lease-over-at-once", HANDOVER, ["ownership::handover::"],
        "two nodes hold the address of a node that is silent for a moment":
        "is_some_and(|end| now >= *end)" => "is_some()";
    "word-about-any-hand-over", HANDOVER, ["ownership::handover::"],
        "a node's word about a former hand-over gives away what it holds again":
        "evidence.released.contains(&(address, record.number))" =>
        "evidence.released.iter().any(|(released, _)| *released == address)";
    "record-forgotten-while-held", HANDOVER, ["ownership::handover::"], "a new object gets an address that a node holds still":
        "_ if target.is_none() && *is_released => HandOverStep::Remove," => "_ if target.is_none() => HandOverStep::Remove,";
    "deleted-object-forgotten", HANDOVER, ["ownership::handover::"],
        "the next leader gives away an address whose object is deleted while its node holds it":
        "changing.extend(evidence.deleted_objects_gateways.keys());" => "";
    "old-node-takes-it-up-at-once", HANDOVER, ["ownership::handover::"],
        "a node takes an address back before the one that has it has let go":
        "HandOver { number: last, from, to: to.filter(|_| waits.is_none()) }" => "HandOver { number: last, from, to }";
    "two-on-a-node-in-between", HANDOVER, ["ownership::handover::"],
        "a node stops serving an address that it has not handed over yet, for a lower one of the object":
        "new.retain(|item| items.iter().all(|stays| stays.node != item.node));" => "";
    "ledger-without-end", HANDOVER, ["ownership::handover::"],
        "while many nodes are silent the ledger outgrows what an API server takes, and nothing moves any more":
        "let mut room = MAX_OPEN.saturating_sub(records.open.len());" => "let mut room = MAX_OPEN;";
    "numbers-given-twice", CONTROLLER_LEDGER, ["controller::ledger::"],
        "after a backup was restored a node's old word gives away what it holds":
        "older.records.last = older.records.last.max(known.records.last);" => "";
    "late-watch-undoes-a-write", CONTROLLER_LEDGER, ["controller::ledger::"], "a leader decides by a ledger from before its own write":
        "is_some_and(|(known, new)| new < known)" => "is_some_and(|_| false)";
    "former-leader-writes", CONTROLLER_LEDGER, ["controller::ledger::"],
        "an agent that has led until now writes what it decided into the next leader's ledger":
        "if self.since.is_none() || self.leadership.since() != self.since {" => "if self.since.is_none() {";
    "former-timeout-not-waited-for", CONTROLLER_LEDGER, ["controller::ledger::"],
        "after the timeout is made shorter addresses are given away that nodes hold by the longer one":
        "lease: lease.effective(own.lease, now)," => "lease: own.lease,";
    "former-grace-not-waited-for", CONTROLLER_LEDGER, ["controller::ledger::"], "likewise, of programs without an agent":
        "programs: programs.effective(own.programs, now)" => "programs: own.programs";

    // What objects say.
    "unreadable-selectors-published", DESIRED_STATUS, ["desired_status::"],
        "pods of an unreadable object leave with their node's address":
        "assigned.no_eligible_node() && !policy.is_unknown(PolicyPart::Selectors)" => "assigned.no_eligible_node()";
    "partly-is-assigned", CONDITIONS, ["status::conditions::"],
        "who waits for an object to be ready goes on without some of its addresses":
        "matches!(reason, Reason::Assigned | Reason::NoPodServed)" => "matches!(reason, Reason::Assigned | Reason::PartiallyAssigned)";
    "no-pod-at-once", POD_COUNTS, ["status::pod_counts::"], "each new object says that it selects no pod":
        "now >= *since + NO_POD_AFTER)" => "now >= *since)";
    "nothing-is-assigned", CONDITIONS, ["status::conditions::"], "an object without addresses says that all of them have a node":
        "statuses().count() > 0 && statuses().all(assigned)" => "statuses().all(assigned)";
    "unreadable-selector-is-assigned", CONDITIONS, ["status::conditions::"], "no condition reports that an object selects no new pods":
        "        () if unreadable(policy, PolicyPart::Selectors) => Reason::InvalidSelector,\n" => "";
    "drained-reads-as-a-typing-error", CONDITIONS, ["status::conditions::"],
        "an object whose nodes are drained says that its addresses are wrong":
        "matches!(status, EntryStatus::NotReady { .. } | EntryStatus::Drained { .. })" =>
        "matches!(status, EntryStatus::NotReady { .. })";
    "exception-said-where-it-is-off", CONDITIONS, ["status::conditions::"],
        "an object says that packets leave with nodes' addresses, and they are dropped":
        "let serves = self.node_address_serves && " => "let serves = ";
    "strict-object-said-to-leak", CONDITIONS, ["status::conditions::"],
        "an object that asks for a drop says that packets leave with nodes' addresses":
        "self.node_address_serves && !policy.drop_unassigned &&" => "self.node_address_serves &&";
    "away-agents-unnamed", CONDITIONS, ["status::conditions::"],
        "an object does not report that the agent of some of its pods is away":
        "causes.extend(without_agent.iter().map(|(node, _)| (*node, AGENT_AWAY)));" => "";
    "isolated-leader-leads-on", ELECTION, ["leader_election::"],
        "a leader that hears no other node takes all addresses to its own, and other nodes do not reach it":
        "if (mine || free) && self.has_stepped_down(now) {" => "if free && mine && self.has_stepped_down(now) {";
    "isolation-goes-unnoticed", NODE_HEALTH, ["node_health::state::"],
        "a leader whose next hop answers does not know that it hears no other node":
        "(self.latest_peer_answer(now), self.no_node_answers(now))" =>
        "(self.latest_peer_answer(now), self.cut_off && self.no_node_answers(now))";
    "open-record-called-off-early", HANDOVER, ["ownership::handover::"],
        "a leader that took over early calls off a hand-over that its former one still writes a status by":
        "if !records.open.contains_key(address))" => "if records.last < u64::MAX || !records.open.contains_key(address))";
    "said-of-an-older-spec", CONDITIONS, ["status::"], "who waits for an edit to be seen waits for ever":
        "\n                && found.observed_generation == policy.origin.generation" => "";
    "half-a-count", POD_COUNTS, ["controller::pod_counts::"],
        "after a change of leaders each object says that it serves a few pods only":
        "is_known.then(|| self.pods.values().filter_map(|pods| of_node(pods, ids)).sum())" =>
        "Some(self.pods.values().filter_map(|pods| of_node(pods, ids)).sum())";
    "node-that-is-back-counts-as-alone", POD_COUNT_REQUESTS, ["controller::pod_counts::"],
        "objects are Degraded for agents that are just starting with their nodes":
        "*last_answer = now;" => "";
    "exception-never-taken-back", STATUS, ["policy::egress_ip::write::"],
        "pods leave with their node's address though a node could have one of their object's":
        "object.published.no_eligible_node.is_some() && unhosted.is_none()" => "object.published.no_eligible_node.is_some() && unhosted.is_some()";
    "refusal-is-stale", STATUS, ["policy::egress_ip::write::"],
        "a status that the API server refuses is written again without end, and not reported":
        "(status.code == 422 && !names_causes)" => "status.code == 422";
    "count-written-without-end", STATUS, ["policy::egress_ip::write::"], "each object is written with each decision":
        "counted.filter(|count| object.published.selected_pods != Some(*count))" => "counted";
    "condition-keeps-its-time", STATUS, ["policy::egress_ip::write::"], "a condition says that it has been so since long before it turned":
        "if found.status == desired.status && !found.last_transition.is_empty()" => "if !found.last_transition.is_empty()";
    "write-over-a-newer-object", STATUS, ["policy::egress_ip::write::"], "a leader that is late writes its status over the next leader's":
        "json!({\"op\": \"test\", \"path\": \"/metadata/resourceVersion\", \"value\": object.origin.resource_version})," => "";
    "way-back-is-a-move", MOVES, ["status::moves::"],
        "an event reports a failover that did not happen, and its time is counted":
        "if from != *node {" => "if !from.is_empty() {";
    "problem-said-each-time", PROBLEMS, ["status::node_problems::"],
        "a broken annotation fills the log with each heartbeat of its node":
        "node.problems.iter().filter(|problem| !reported.contains(problem))" => "node.problems.iter()";
}
