//! Health probes from a pod, as a controller would send them but for the key: nothing of what they say may count.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic::transport::{Endpoint, Uri};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::fault_test::FaultTest;
use crate::prelude::*;
use egress_lab::background::Background;
use egress_lab::topology::netns::link_address;

const PORT: u16 = 9107;
const SERVICE: &str = "Service_Egress_IP";
const LASTS: Duration = Duration::from_secs(20);
/// Of each kind at a time.
const AT_ONCE: usize = 16;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(super) fn play(test: &mut FaultTest<'_>) -> Result<()> {
    let node = test.cluster.base.lab.node(test.gateway).clone();
    let pod = test
        .cluster
        .base
        .lab
        .pods()
        .iter()
        .find(|pod| pod.node == test.leader)
        .context("a pod of the leader's node")?;
    let (pod, to) = (pod.netns.clone(), SocketAddr::new(node.management().v4.into(), PORT));
    test.say("the agent is restarted, so that a controller's session is seen from its beginning");
    let device = node.management_port();
    let record = Background::start_in(&node.host, move |stop| record(device, stop))?;
    test.agent().restart()?;
    test.cluster.wait_for_agents()?;
    test.wait(Duration::from_secs(3))?;
    let session = record.finish()?;
    test.say(&format!("probes from a pod begin; the session to replay has {} bytes", session.len()));
    let (from, of) = (test.leader.name(), node.name());
    let attack = Attack::start(&pod, to, (from, of), session)?;
    test.wait(LASTS)?;
    let counts = attack.finish()?;
    test.say(&format!("probes from a pod end: {counts}"));
    Ok(())
}

/// What a pod has sent and heard.
#[derive(Default)]
struct ProbeCounts {
    plain: AtomicU64,
    forged: AtomicU64,
    answered: AtomicU64,
    replayed: AtomicU64,
    malformed: AtomicU64,
}

struct Attack {
    counts: Arc<ProbeCounts>,
    senders: Vec<Background<()>>,
}

impl Attack {
    fn start(pod: &Netns, to: SocketAddr, names: (String, String), session: Vec<u8>) -> Result<Self> {
        let counts = Arc::new(ProbeCounts::default());
        let count = Arc::clone(&counts);
        let asked = Background::start_in(pod, move |stop| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (local, target) = ((Arc::new(names), count), format!("http://{to}").parse::<Uri>()?);
            let asks = (0..2 * AT_ONCE).map(|number| ask(target.clone(), number % 2 == 0, local.clone(), stop));
            runtime.block_on(futures::future::join_all(asks));
            Ok(())
        })?;
        let count = Arc::clone(&counts);
        let poured = Background::start_in(pod, move |stop| {
            while !stop.load(Ordering::Relaxed) {
                count.replayed.fetch_add(u64::from(pour(to, &session)), Ordering::Relaxed);
                for bytes in malformed() {
                    count.malformed.fetch_add(u64::from(pour(to, &bytes)), Ordering::Relaxed);
                }
            }
            Ok(())
        })?;
        Ok(Self { counts, senders: vec![asked, poured] })
    }

    fn finish(self) -> Result<String> {
        Background::finish_all(self.senders)?;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let ProbeCounts { plain, forged, answered, replayed, malformed } = &*self.counts;
        Ok(format!(
            "{} not signed, {} wrongly signed, {} of these answered, {} sessions replayed, {} malformed",
            of(plain),
            of(forged),
            of(answered),
            of(replayed),
            of(malformed)
        ))
    }
}

type Local = (Arc<(String, String)>, Arc<ProbeCounts>);

/// Asks by a session of its own, as fast as answers come.
async fn ask(target: Uri, signed: bool, (names, counts): Local, stop: &AtomicBool) {
    let mut number = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        // Refused, or closed by the agent as one too many: tried again.
        let endpoint = Endpoint::from(target.clone()).connect_timeout(Duration::from_secs(1));
        let Ok(channel) = endpoint.connect().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let mut client = HealthClient::new(channel);
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let sent = if signed { &counts.forged } else { &counts.plain };
            sent.fetch_add(1, Ordering::Relaxed);
            let asked = client.check(request(signed, &names, number));
            match tokio::time::timeout(Duration::from_secs(1), asked).await {
                Ok(Ok(_)) => drop(counts.answered.fetch_add(1, Ordering::Relaxed)),
                Ok(Err(_)) | Err(_) => break,
            }
        }
    }
}

/// What a leader of a great term would say, with a signature of none.
fn request(signed: bool, (from, to): &(String, String), number: u64) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
    if !signed {
        return request;
    }
    let metadata = request.metadata_mut();
    let entries = [
        ("egress-agent-probe", format!("7 {number} {} 4000000000", number - 1)),
        ("egress-agent-total-timeout", "3600000".to_owned()),
        ("egress-agent-api-returned-age", "1".to_owned()),
        ("egress-agent-challenge", format!("{number} 0")),
        ("egress-agent-let-go", "172.18.0.110=1000000 fd00:172:18::110=1000000".to_owned()),
        ("egress-agent-from", from.clone()),
        ("egress-agent-to", to.clone()),
    ];
    for (name, value) in entries {
        // Digits and names are ASCII.
        if let Ok(value) = value.parse() {
            metadata.insert(name, value);
        }
    }
    metadata.insert_bin("egress-agent-signature-bin", MetadataValue::from_bytes(&[0x5a; 32]));
    request
}

/// Beginnings of sessions that are none, or end in what no frame is.
fn malformed() -> [Vec<u8>; 3] {
    let noise: Vec<u8> = (0..4096_u32).map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let settings = b"\0\0\0\x04\0\0\0\0\0";
    [
        noise.clone(),
        [PREFACE, settings, &noise].concat(),
        // Headers that claim to be 16 MiB long.
        [PREFACE, settings, b"\xff\xff\xff\x01\x04\0\0\0\x01", &noise].concat(),
    ]
}

/// Sends bytes by a connection of their own, and hears a moment of what comes.
fn pour(to: SocketAddr, bytes: &[u8]) -> bool {
    let pour = || -> std::io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_millis(500))?;
        stream.set_read_timeout(Some(Duration::from_millis(50)))?;
        stream.set_write_timeout(Some(Duration::from_millis(500)))?;
        stream.write_all(bytes)?;
        let mut answer = [0; 512];
        // Closed, reset, or silent: whatever the agent does with it.
        drop(stream.read(&mut answer));
        Ok(())
    };
    pour().is_ok()
}

/// What controllers send to a node's health port: the bytes of the longest session that was seen from its beginning.
fn record(device: &str, stop: &AtomicBool) -> Result<Vec<u8>> {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)?;
    bind(socket.as_raw_fd(), &link_address(device)?)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50))?;
    let mut sessions: BTreeMap<u16, BTreeMap<u32, Vec<u8>>> = BTreeMap::new();
    let mut frame = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut frame) {
            Ok((length, _)) => {
                if let Some((port, sequence, data)) = segment(&frame[..length]) {
                    sessions.entry(port).or_default().entry(sequence).or_insert_with(|| data.to_vec());
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("the record cannot read"),
        }
    }
    let whole = sessions.into_values().map(joined).filter(|session| session.starts_with(PREFACE));
    let longest = whole.max_by_key(Vec::len).context("no session of a controller was seen")?;
    ensure!(longest.len() > PREFACE.len(), "the session has no probe");
    Ok(longest)
}

/// Source port, sequence number and data of a segment to the health port, IPv4.
fn segment(frame: &[u8]) -> Option<(u16, u32, &[u8])> {
    let packet = frame.strip_prefix(frame.get(..12)?)?.strip_prefix(&[0x08, 0x00])?;
    let (header, total) =
        (usize::from(packet.first()? & 0xf) * 4, u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]));
    let tcp = packet.get(header..usize::from(total))?;
    let to = u16::from_be_bytes([*tcp.get(2)?, *tcp.get(3)?]);
    if *packet.get(9)? != 6 || to != PORT {
        return None;
    }
    let sequence = u32::from_be_bytes(tcp.get(4..8)?.try_into().ok()?);
    let data = tcp.get(usize::from(tcp.get(12)? >> 4) * 4..)?;
    (!data.is_empty()).then_some((u16::from_be_bytes([*tcp.first()?, *tcp.get(1)?]), sequence, data))
}

/// Segments in the order of their numbers, up to the first that is missing.
fn joined(segments: BTreeMap<u32, Vec<u8>>) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), None);
    for (sequence, data) in segments {
        if next.is_some_and(|next| next != sequence) {
            break;
        }
        next = u32::try_from(data.len()).ok().map(|length| sequence.wrapping_add(length));
        bytes.extend(data);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_ends_where_a_segment_is_missing() {
        let segments = [(7, b"abc".to_vec()), (10, b"de".to_vec()), (20, b"f".to_vec())];
        assert_eq!(joined(segments.into()), b"abcde");
    }

    #[test]
    fn segments_to_other_ports_are_left_out() {
        let mut frame = vec![0; 14 + 20 + 20 + 2];
        frame[12] = 8;
        frame[14] = 0x45;
        frame[17] = 42;
        frame[23] = 6;
        frame[36..38].copy_from_slice(&PORT.to_be_bytes());
        frame[46] = 0x50;
        assert_eq!(segment(&frame).map(|(_, _, data)| data.len()), Some(2));
        frame[37] = 0;
        assert_eq!(segment(&frame), None);
    }
}
