//! Test cases on the lab: real agents, real packets and, where it is installed, real kubectl. The first line of each file says
//! what it shows. `senders` is a helper: which nodes send from an address.

mod antrea;
mod api_user;
mod bad_objects;
mod bad_start;
mod baseline;
mod changes;
mod cilium;
pub(crate) mod cleanup;
mod cni_plugin;
mod conditions;
mod conflict_detection;
mod dead_agent;
mod egress_routers;
mod egress_service;
pub mod explain;
mod first_packets;
mod gitops;
mod handover;
mod health_port;
mod image;
mod inspect;
mod isolation;
mod kubectl;
mod late_management_port;
mod leader;
mod leak;
mod lifecycle;
mod load_balancer;
pub mod metrics;
mod migrate;
mod nat_log;
mod nic;
mod planned_moves;
mod pod_addresses;
mod reachability;
mod restart;
mod rolling;
mod second_network;
mod selection;
mod senders;
mod story;
mod task_panics;
mod tls;

use std::time::Duration;

use egress_lab::test::LabTest;

/// Also in a test of the lab alone, which starts no agent and sends beside large transfers.
const OVN_LOSES: &str = "Open vSwitch in user space drops single datagrams on a busy machine, without any agent too";

/// The tests of this folder, for the list of all tests on the lab.
pub fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(120), run);
    let mut tests = baseline::tests();
    tests.extend(second_network::tests());
    tests.extend(load_balancer::tests());
    tests.extend(egress_service::tests());
    tests.extend(egress_routers::tests());
    tests.extend(antrea::tests());
    tests.extend(cilium::tests());
    tests.extend(nic::tests());
    tests.extend([
        test("migrate_makes_egress_ips_of_egresses", migrate::egresses_become_egress_ips),
        test("story_succeeds_and_leaves_nothing", story::of_egress_ips),
        LabTest::new(
            "story_held_shows_what_can_be_pasted",
            Duration::from_secs(240),
            story::held_shows_what_can_be_pasted,
        ),
        test("story_of_antrea_succeeds_and_leaves_nothing", story::of_antrea),
        test("story_of_cilium_succeeds_and_leaves_nothing", story::of_cilium),
        test("story_of_the_egress_router_succeeds_and_leaves_nothing", story::of_the_egress_router),
        test("leader_goes_and_another_takes_over", leader::goes_and_another_comes),
        test("leader_loses_its_node", reachability::leader_loses_its_node),
        test("leader_that_hears_no_node", reachability::leader_that_hears_no_node_lets_another_lead),
        test("leak_is_seen_by_its_judge", leak::judge_can_say_no),
        test("recreated_devices_are_attached_at_once", leak::devices::attached_at_once),
        LabTest::new("nothing_leaks_while_everything_changes", Duration::from_secs(180), leak::nothing_leaks),
        test("kubectl_drives_everything", kubectl::drives_everything),
        test("bad_start_is_refused_in_one_line", bad_start::one_clear_line),
        test("bad_objects_are_reported_and_isolated", bad_objects::are_reported_and_isolated),
        test("isolation_objects_without_pods_affect_no_others", isolation::objects_without_pods_affect_no_others)
            .alone()
            .not_on_ovn(OVN_LOSES),
        test(
            "isolation_services_with_many_addresses_affect_no_others",
            isolation::services_with_many_addresses_affect_no_others,
        )
        .alone(),
        test("served_moved_and_removed", lifecycle::from_nothing_to_removed),
        test("served_moved_and_removed", lifecycle::from_nothing_to_removed)
            .on_a_bridge("bridge_served_moved_and_removed"),
        test("nodes", reachability::cut_off_nodes_lose_their_addresses)
            .on_a_bridge("bridge_cut_off_nodes_lose_their_addresses"),
        test("next_hops", reachability::next_hops_count_where_one_node_alone_has_lost_its_own)
            .on_a_bridge("bridge_next_hops_count_where_one_node_alone_has_lost_its_own"),
        test("restarts", restart::under_traffic).on_a_bridge("bridge_restarts_of_agents_lose_no_packet"),
        test("first", first_packets::of_pods_with_unknown_addresses)
            .on_a_bridge("bridge_first_packets_of_pods_with_unknown_addresses"),
        test("cni", cni_plugin::no_first_packet_is_lost).on_a_bridge("bridge_cni_plugin_loses_no_first_packet"),
        test("status_says_what_is_not_served", conditions::of_what_is_not_served),
        test("status_counts_pods_and_names_absent_agents", conditions::of_selected_pods_and_absent_agents),
        test("status_of_an_older_object_that_can_serve_nothing", conditions::of_an_older_object_that_can_serve_nothing),
        test("isolation_flows_of_one_pod_affect_no_others", isolation::flows_of_one_pod_affect_no_others)
            .alone()
            .not_on_ovn(OVN_LOSES),
        test("isolation_long_invalid_input_is_quoted_in_part", isolation::long_invalid_input_is_quoted_in_part),
        test("cleanup_leaves_nothing", cleanup::leaves_nothing),
        test("image_agent_from_it_serves", image::agent_from_the_image_serves),
        test("restarts_of_agents_lose_no_packet", restart::under_traffic),
        test("rolling_updates_lose_no_more_than_documented", rolling::lose_no_more_than_documented).alone(),
        test("start_is_stopped_at_once", restart::stopped_while_it_starts),
        test("no_pod_sends_before_the_programs", late_management_port::no_pod_sends_before_the_programs),
        test("claims_are_probed_for_each_time", conflict_detection::are_probed_for_each_time),
        test("claims_are_refused_with_a_reason", conflict_detection::are_refused_with_a_reason),
        test("dead_agent_does_not_keep_its_addresses", dead_agent::does_not_keep_its_addresses),
        test("dead_agent_is_waited_for_without_a_health_port", dead_agent::is_waited_for_without_a_health_port),
        test("cut_off_nodes_lose_their_addresses", reachability::cut_off_nodes_lose_their_addresses),
        test(
            "links_that_are_back_send_nothing_by_an_address_that_has_moved",
            reachability::links_that_are_back_send_nothing_by_an_address_that_has_moved,
        ),
        test(
            "nodes_that_the_overlay_does_not_reach_lose_their_addresses",
            reachability::nodes_that_the_overlay_does_not_reach_lose_their_addresses,
        ),
        test(
            "nodes_that_die_together_lose_their_addresses",
            reachability::nodes_that_die_together_lose_their_addresses,
        ),
        test(
            "next_hops_count_where_one_node_alone_has_lost_its_own",
            reachability::next_hops_count_where_one_node_alone_has_lost_its_own,
        ),
        test("slow_api_server_moves_nothing", reachability::slow_api_server_moves_nothing),
        test("what_leaves_the_path_whole_moves_nothing", reachability::what_leaves_the_path_whole_moves_nothing),
        test("hand_over_old_node_releases_first", handover::old_node_releases_first),
        test("hand_over_next_leader_continues", handover::next_leader_continues),
        test("hand_over_node_without_api_server_learns_by_probes", handover::node_without_api_server_learns_by_probes),
        test("leases_outlive_the_api_server", handover::api_server_outage_ends_no_lease),
        test("hand_over_cut_off_node_gives_up_first", handover::cut_off_node_gives_up_first),
        test("nat_log_names_the_pod", nat_log::names_the_pod),
        test("status_with_and_without_an_agent", inspect::status_with_and_without_an_agent),
        LabTest::new(
            "task_that_panics_ends_the_agent",
            Duration::from_secs(300),
            task_panics::one_that_panics_ends_the_agent,
        ),
        test("planned_moves_lose_nothing", planned_moves::moves_lose_nothing),
        test("planned_drain_moves_what_can_go", planned_moves::drain_moves_what_can_go),
        test("health_checks_by_tls", tls::health_checks_by_tls),
        test(
            "health_port_many_connections_keep_no_leader_waiting",
            health_port::crowd_of_a_pod_keeps_no_leader_waiting,
        )
        .alone(),
        test(
            "health_port_something_else_is_not_believed",
            health_port::something_else_at_a_health_address_is_not_believed,
        ),
        test("health_port_key_is_replaced_while_all_serve", health_port::a_key_is_replaced_while_all_serve),
        test("selectors_of_every_kind_select", selection::selectors_select),
        test("only_endpoints_are_selected", selection::only_endpoints_count),
        test("oldest_object_serves", selection::oldest_object_serves),
        test("pod_addresses_of_annotations_change_no_source", pod_addresses::annotations_change_no_source),
        test("changes_affect_no_others", changes::labels_and_pods),
        test(
            "api_user_service_keeps_no_egress_ip_from_coming_back",
            api_user::a_service_keeps_no_egress_ip_from_coming_back,
        ),
        test("api_user_unscheduled_pods_reserve_no_address", api_user::unscheduled_pods_reserve_no_address),
    ]);
    tests
}
