//! What new pods send first.

use super::*;

/// New pods, every second one selected; the first packet of each is an echo request to an address of its own, of which there is
/// one alone.
const PODS: u8 = 40;

/// With the plugin in the CNI's chain no first packet is lost.
pub(super) fn first_packets(test: &mut NodeTest) -> Result<()> {
    let mut wrong = Vec::new();
    for one in new_pods(test)? {
        if one.echoes != 1 || one.strange > 0 || one.asked != [one.source] {
            wrong.push(format!("{one:?}"));
        }
    }
    ensure!(wrong.is_empty(), "{} of {PODS}: {}", wrong.len(), wrong.join("; "));
    Ok(())
}

/// What became of the first packets of a new pod, and of its request by TCP.
#[derive(Debug)]
pub(super) struct NewPod {
    pub(super) name: String,
    /// The address that it is to leave with.
    pub(super) source: IpAddr,
    pub(super) echoes: usize,
    /// Packets with another source.
    pub(super) strange: usize,
    /// The address that the server has seen its request come from.
    pub(super) asked: Vec<IpAddr>,
}

pub(super) fn new_pods(test: &NodeTest) -> Result<Vec<NewPod>> {
    test.lease_has_no_end()?;
    let cluster = &test.cluster;
    let server_addresses: Vec<IpAddr> = (0..PODS).map(|number| plan::server_address(number).v4.into()).collect();
    let capture = Capture::watching(&cluster.lab, server_addresses.iter().copied().collect())?;
    let mark = cluster.server.log().mark();
    let mut houses: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    let mut expected = Vec::new();
    for (number, server_address) in (0..PODS).zip(&server_addresses) {
        let house = if number % 2 == 0 { "simpson" } else { "bouvier" };
        let node = if number % 4 < 2 { "node1" } else { "node2" };
        let name = format!("new-{number}");
        let request = format!("GET / HTTP/1.0\r\nUser-Agent: {name}\r\n\r\n");
        // The server takes a connection whose input has ended for one that is given up.
        let script = format!(
            "ping -c 1 -W 5 {server_address}; (printf '{request}'; sleep 2) | nc -w 5 {server_address} {HTTP_PORT}"
        );
        houses.entry(house).or_default().push((name.clone(), node, Some(script)));
        let own = cluster.node(node)?.lab.number.address().v4.into();
        expected.push((name, *server_address, if house == "simpson" { EGRESS_IP } else { own }));
    }
    houses.iter().try_for_each(|(house, pods)| cluster.add_pods(house, pods))?;
    let mut done = 0;
    until_true("forty pods have asked", KUBERNETES, || {
        let pods = cluster.list(&["pods", "-A", "-l", "made-for=tests"])?;
        let ended = |pod: &&Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let now = pods.iter().filter(ended).count();
        if now > done {
            (done, _) = (now, println!("{now} of {PODS} pods have ended"));
        }
        Ok(now == usize::from(PODS))
    })?;
    let requests = cluster.server.log().since(mark);
    let seen = capture.finish()?;
    for house in houses.keys() {
        cluster.kubectl(&["-n", house, "delete", "pods", "-l", "made-for=tests", "--grace-period=0", "--force"])?;
    }
    let result = expected.into_iter().map(|(name, server_address, source)| {
        let packets: Vec<_> = seen.captured.iter().filter(|one| one.destination == server_address).collect();
        let echoes = packets.iter().filter(|one| one.protocol == 1).count();
        let strange = packets.iter().filter(|one| one.source != source).count();
        let asked = requests.iter().filter(|one| one.user_agent == name).map(|one| one.client.ip()).collect();
        NewPod { name, source, echoes, strange, asked }
    });
    Ok(result.collect())
}
