//! Connections that an edit cuts: every pod learns of it at once, also one that only waits for data; other pods see nothing; and
//! no packet of a cut connection is seen outside with another address.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::anyhow;

use super::findings::Findings;
use crate::prelude::*;
use egress_lab::test_cluster::placement::{FIRST_V4, FIRST_V6, OBJECT, SECOND_V4};

pub(super) fn tests() -> Vec<LabTest> {
    vec![
        LabTest::new("paths_cut_connections_are_told", Duration::from_secs(150), cut).not_on_ovn(
            "OVN drops what is outside of a connection's window: an idle pod learns of the cut when it sends",
        ),
    ]
}

const TICK: Duration = Duration::from_millis(20);
/// Of each kind and family, for each pod.
const EACH: usize = 3;
/// From the edit on.
const AT_ONCE: Duration = Duration::from_secs(2);
/// How long connections are watched that must not be affected.
const WATCHED: Duration = Duration::from_secs(4);

/// A connection that waits for data which never comes.
struct Idle {
    stream: TcpStream,
    reader: JoinHandle<Result<(io::Result<usize>, Instant)>>,
}

impl Idle {
    fn start(pod: &LabPod, to: SocketAddr) -> Result<Self> {
        let (tell, reported) = mpsc::channel();
        let reader = pod.netns.spawn(move || {
            let mut stream = TcpStream::connect_timeout(&to, client::PATIENCE)?;
            stream.write_all(b"8 bytes.")?;
            stream.read_exact(&mut [0; 8])?;
            tell.send(stream.try_clone()?).map_err(|_| anyhow!("the receiver has ended"))?;
            let ended = stream.read(&mut [0; 8]);
            Ok((ended, Instant::now()))
        })?;
        let stream = reported.recv_timeout(client::PATIENCE).context("an idle connection did not open")?;
        Ok(Self { stream, reader })
    }

    /// Why and when it ended before now, if it did.
    fn finish(self) -> Result<Option<(ErrorKind, Instant)>> {
        // What has ended already cannot be ended again.
        let _ended = self.stream.shutdown(Shutdown::Both);
        let (ended, when) = self.reader.join().map_err(|_panic| anyhow!("an idle connection panicked"))??;
        Ok(ended.err().map(|error| (error.kind(), when)))
    }
}

/// The connections of one pod.
struct PodConnections {
    name: String,
    idle: Vec<Idle>,
    busy: Vec<TrafficFlow>,
}

impl PodConnections {
    fn start(pod: &LabPod, servers: &[IpAddr]) -> Result<Self> {
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        for server in servers {
            let to = SocketAddr::new(*server, ECHO_PORT);
            for _ in 0..EACH {
                idle.push(Idle::start(pod, to)?);
                busy.push(TrafficFlow::tcp(&pod.netns, to, TICK, 3 * client::PATIENCE)?);
            }
        }
        Ok(Self { name: pod.name.clone(), idle, busy })
    }

    /// Each of them heard of the edit, in time.
    fn was_cut(self, edit: &str, begun: Instant, findings: &mut Findings) -> Result<()> {
        let (mut wrong, mut latest) = (Vec::new(), Duration::ZERO);
        let (idle, busy) = (self.idle.len(), self.busy.len());
        for connection in self.idle {
            match connection.finish()? {
                Some((ErrorKind::ConnectionReset, when)) => latest = latest.max(when.saturating_duration_since(begun)),
                other => wrong.push(format!("idle: {other:?}")),
            }
        }
        for flow in self.busy {
            let report = flow.finish()?;
            if report.broken != Some(ErrorKind::ConnectionReset) {
                wrong.push(format!("busy: {:?}", report.broken));
            }
        }
        let what = format!(
            "{edit}: {idle} idle and {busy} busy connections of {} reset, the last idle one after {latest:?} {wrong:?}",
            self.name
        );
        findings.note(wrong.is_empty() && latest < AT_ONCE, &what);
        Ok(())
    }

    /// None of them noticed.
    fn continues(self, edit: &str, findings: &mut Findings) -> Result<()> {
        let mut wrong = Vec::new();
        let (idle, busy) = (self.idle.len(), self.busy.len());
        for connection in self.idle {
            wrong.extend(connection.finish()?.map(|(error, _)| format!("idle: {error:?}")));
        }
        for flow in self.busy {
            let report = flow.finish()?;
            wrong.extend(report.broken.map(|error| format!("busy: {error:?}")));
            if report.lost() > 0 {
                wrong.push(format!("busy: {} lost", report.lost()));
            }
        }
        let what = format!("{edit}: {idle} idle and {busy} busy connections of {} continue {wrong:?}", self.name);
        findings.note(wrong.is_empty(), &what);
        Ok(())
    }
}

fn cut(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::for_placement(context, HostConfig::mixed)?;
    // A node holds one address of an object.
    cluster.place(&[(FIRST_V4, 1), (FIRST_V6, 2)])?;
    let capture = Capture::start(&cluster.lab)?;
    let mut findings = Findings::default();
    let servers = plan::SERVER.both();
    // Only node 1 has others that show its address outside.
    let plain = PodConnections::start(cluster.plain(1)?, &servers)?;

    // The gateway is the own node of the one for IPv4, and of the other for IPv6.
    for node in [1, 2] {
        let left = PodConnections::start(cluster.chosen(node)?, &servers)?;
        let stays = PodConnections::start(cluster.chosen(3 - node)?, &servers)?;
        let edit = format!("chosen{node} is selected no more");
        let begun = Instant::now();
        cluster.set_role(cluster.chosen(node)?, "none")?;
        thread::sleep(WATCHED);
        left.was_cut(&edit, begun, &mut findings)?;
        stays.continues(&edit, &mut findings)?;
        cluster.set_role(cluster.chosen(node)?, "chosen")?;
        cluster.settle(&[FIRST_V4, FIRST_V6])?;
    }

    // An address is taken, the other family stays.
    let (v4, v6) = (plan::SERVER.v4.into(), plan::SERVER.v6.into());
    let lost: Vec<PodConnections> = parties(&cluster, &[v4])?;
    let kept: Vec<PodConnections> = parties(&cluster, &[v6])?;
    let begun = Instant::now();
    cluster.list(OBJECT, "chosen", &[SECOND_V4, FIRST_V6])?;
    thread::sleep(WATCHED);
    let edit = "the IPv4 address is replaced";
    lost.into_iter().try_for_each(|party| party.was_cut(edit, begun, &mut findings))?;
    kept.into_iter().try_for_each(|party| party.continues(edit, &mut findings))?;
    cluster.settle(&[SECOND_V4, FIRST_V6])?;

    let lost = parties(&cluster, &servers)?;
    let begun = Instant::now();
    cluster.forget(OBJECT)?;
    thread::sleep(WATCHED);
    let edit = "the object is deleted";
    lost.into_iter().try_for_each(|party| party.was_cut(edit, begun, &mut findings))?;
    plain.continues("all of it", &mut findings)?;

    let seen = capture.finish()?;
    findings.equal("packets outside with a pod's address", &0, &seen.to_the_world(AddressKind::Pod));
    for node in [2, 3] {
        let own = NodeNumber::new(node)?.address();
        let masked = seen.packets(|key| own.is(key.source) && key.to_port == ECHO_PORT);
        findings.equal(&format!("packets of cut connections with node {node}'s address"), &0, &masked);
    }
    let checksums = seen.check();
    findings.right(&format!("checksums of {} frames", seen.frames), &checksums);
    findings.conclude()
}

/// Connections of every chosen pod to these servers.
fn parties(cluster: &TestCluster, servers: &[IpAddr]) -> Result<Vec<PodConnections>> {
    (1..=3).map(|node| PodConnections::start(cluster.chosen(node)?, servers)).collect()
}
