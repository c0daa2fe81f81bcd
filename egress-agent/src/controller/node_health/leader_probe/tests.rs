//! Against real sockets on loopback.

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::DropGuard;

use super::*;
use crate::change_queue::{ChangeSender, inbox};
use egress_core::leader_election::identity;

/// A few times what a silent node has.
const PROOF: Duration = Duration::from_millis(1500);

/// Takes few connections as long as nobody accepts them, then is as silent as a node without power.
fn listener(address: &str) -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(address.parse().expect("a literal")).expect("a port");
    socket.listen(1).expect("listens")
}

struct Play {
    nodes: ChangeSender,
    holder: watch::Sender<Option<String>>,
    silence: watch::Receiver<Option<SilentHolder>>,
    _stop: DropGuard,
}

/// Knocks at a node that has these addresses, whose controller leads.
fn knocking(addresses: &[IpAddr], port: u16) -> Play {
    let ((nodes, taker), stop) = (inbox(), CancellationToken::new());
    let ((holder, is_holder), (silent, silence)) =
        (watch::channel(Some(identity("node1", 1, 1))), watch::channel(None));
    tokio::spawn(run(port, taker, is_holder, silent, stop.clone()));
    let node = Node { name: "node1".into(), internal: addresses.to_vec(), ..Node::default() };
    nodes.put(Change::Nodes(Update::Replaced([("node1".to_owned(), Arc::new(node))].into())));
    Play { nodes, holder, silence, _stop: stop.drop_guard() }
}

impl Play {
    async fn falls_silent(&mut self) -> Option<SilentHolder> {
        let silent = self.silence.wait_for(Option::is_some);
        tokio::time::timeout(PROOF, silent).await.ok()?.expect("it runs").clone()
    }
}

#[tokio::test]
async fn a_node_is_silent_when_it_does_not_answer_any_more_and_until_it_does() {
    let begin = Instant::now();
    let listener = listener("127.1.31.1:0");
    let address = listener.local_addr().expect("an address");
    let mut play = knocking(&[address.ip()], address.port());
    let silence = play.falls_silent().await.expect("silent");
    assert_eq!(silence.holder, identity("node1", 1, 1));
    assert!(silence.since > begin && silence.since.elapsed() >= Timing::default().silence);
    tokio::spawn(async move {
        while let Ok(accepted) = listener.accept().await {
            drop(accepted);
        }
    });
    let answers = play.silence.wait_for(Option::is_none);
    assert!(tokio::time::timeout(PROOF, answers).await.is_ok(), "it answers again");
    assert_eq!(play.falls_silent().await, None, "it goes on to answer");
}

#[tokio::test]
async fn one_address_that_answers_is_enough_and_a_refusal_is_an_answer() {
    let full = listener("127.1.32.1:0");
    let address = full.local_addr().expect("an address");
    // Nobody listens at the other.
    let mut play = knocking(&[address.ip(), [127, 1, 32, 2].into()], address.port());
    assert_eq!(play.falls_silent().await, None);
    drop(play.nodes);
}

#[tokio::test]
async fn who_has_never_answered_is_not_silent_and_another_leader_is_another() {
    let full = listener("127.1.33.1:0");
    let address = full.local_addr().expect("an address");
    let mut queue = Vec::new();
    while let Ok(Ok(connection)) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        queue.push(connection);
    }
    assert_eq!(knocking(&[address.ip()], address.port()).falls_silent().await, None, "a firewall, as far as one knows");
    assert_eq!(knocking(&[], address.port()).falls_silent().await, None, "no address is known");

    let other = listener("127.1.33.2:0");
    let address = other.local_addr().expect("an address");
    let mut play = knocking(&[address.ip()], address.port());
    assert!(play.falls_silent().await.is_some());
    play.holder.send_replace(Some(identity("node1", 2, 2)));
    let forgotten = play.silence.wait_for(Option::is_none);
    assert!(tokio::time::timeout(PROOF, forgotten).await.is_ok(), "a controller that has just begun to lead");
    assert_eq!(play.falls_silent().await, None);
}
