//! The records of the node's egress interfaces.

use std::collections::BTreeSet;

use egress_core::model::interface::{EgressInterface, InterfaceReason, InterfaceState};
use egress_datapath::devices::host::Host;
use egress_datapath::devices::interfaces::FurtherNextHops;
use egress_datapath::devices::records::{dump, records};
use ipnet::IpNet;
use tokio::sync::watch::channel;

use crate::node::{MGMT, TestNode, UPLINK, device, ip, on_node};

impl TestNode {
    pub(crate) fn make_eth1(&self) {
        let outside = self.outside_path();
        ip(&format!(
            "link add eth1 mtu 1400 type veth peer name lan1 netns {outside}\n\
             addr add 10.10.10.2/24 dev eth1\n\
             link set eth1 up\n\
             addr add fd00:10::2/64 dev eth1 nodad\n"
        ));
        self.outside(|| {
            ip("link set lan1 up\naddr add 10.10.10.1/24 dev lan1\naddr add fd00:10::1/64 dev lan1 nodad\n");
        });
    }
}

async fn read(host: &Host) -> Vec<EgressInterface> {
    let (links, addresses) = dump(&host.netlink).await.expect("ask the kernel");
    records(&links, &addresses, (UPLINK, MGMT))
}

/// A line for each record: its name and networks, with the reason of those that host nothing.
fn lines(records: &[EgressInterface]) -> Vec<String> {
    let network = |(network, excluded): (&IpNet, &Option<InterfaceReason>)| match excluded {
        Some(reason) => format!(" {network}={}", reason.code()),
        None => format!(" {network}"),
    };
    records.iter().map(|one| format!("{}{}", one.name, one.networks.iter().map(network).collect::<String>())).collect()
}

#[test]
fn nic_records_follow_the_devices() {
    on_node(|node| async move {
        let uplink = "breth0 172.18.0.0/16 fd00:172:18::/64";
        let further = FurtherNextHops { asked: channel(Vec::new()).1, lost: channel(BTreeSet::new()).0 };
        let host =
            Host::new((UPLINK.into(), MGMT.into()), channel(Vec::new()).1, further).expect("open a netlink socket");
        let before = read(&host).await;
        assert_eq!(lines(&before), [uplink], "neither the loopback device nor the management port");
        assert_eq!((before[0].is_uplink, &before[0].state), (true, &InterfaceState::Usable));

        node.make_eth1();
        let late = read(&host).await;
        assert_eq!(lines(&late), [uplink, "eth1 10.10.10.0/24 fd00:10::/64"]);
        let (index, mac) = device("eth1");
        assert_eq!((late[1].index, late[1].mac, late[1].mtu, late[1].is_uplink), (index, mac, 1400, false));
        assert_eq!(late[1].state, InterfaceState::Usable);

        ip("addr add 10.10.10.3/24 dev eth1\n\
            addr add 10.10.10.9/32 dev eth1\n\
            addr add 10.10.11.2/24 dev eth1 label eth1:vip\n\
            addr add fd00:11::2/64 dev eth1 nodad preferred_lft 0\n");
        let all = "eth1 10.10.10.0/24 10.10.11.0/24=VirtualIP fd00:10::/64 fd00:11::/64=Deprecated";
        assert_eq!(lines(&read(&host).await), [uplink, all]);

        // A device that is set down loses its IPv6 addresses.
        ip("link set eth1 down\nlink set eth1 name nic1\naddr del 10.10.11.2/24 dev nic1\n");
        let renamed = read(&host).await;
        assert_eq!(lines(&renamed), [uplink, "nic1 10.10.10.0/24"]);
        assert_eq!(renamed[1].index, index);
        ip("addr flush dev nic1\naddr add 10.10.12.2/24 dev nic1\n");
        assert_eq!(lines(&read(&host).await), [uplink, "nic1 10.10.12.0/24"], "renumbered");

        ip("link add br1 type bridge\n\
            link set nic1 master br1\n\
            addr add 10.10.13.2/24 dev br1\n\
            link add mac1 link breth0 type macvlan mode bridge\n\
            addr add 10.10.14.2/24 dev mac1\n");
        let others = [uplink, "br1 10.10.13.0/24", "mac1 10.10.14.0/24"];
        assert_eq!(lines(&read(&host).await), others, "no port of a bridge");

        ip("link set breth0 down\n");
        let down = read(&host).await;
        assert_eq!(down[0].state, InterfaceState::Attached(InterfaceReason::Down));
        ip("link set breth0 up\n");
        node.outside(|| ip("link set out0 down\n"));
        assert_eq!(read(&host).await[0].state, InterfaceState::Attached(InterfaceReason::NoCarrier));
        ip("link del br1\nlink del mac1\nlink del nic1\n");
        assert_eq!(read(&host).await.len(), 1);
    });
}
