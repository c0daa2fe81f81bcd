//! Connections that each pod keeps, and new ones that it opens at a constant rate, all to the server outside. The report has
//! the result of each.

use std::io::{self, ErrorKind};
use std::net::Ipv6Addr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::prelude::*;
use egress_lab::background::Background;
use egress_lab::wait::poll;

/// The interval of messages on a kept connection.
const SPEAKS: Duration = Duration::from_secs(1);
/// A new connection that has no answer by then has failed: as long as a lost SYN waits before it is sent again.
const PATIENCE: Duration = Duration::from_secs(1);
/// A connection whose echo has taken longer has stalled. A segment that is lost is sent again after a fifth of it.
const STALLED: Duration = Duration::from_secs(1);
/// A kept connection is given up when it has been silent for as long.
const GIVEN_UP: Duration = Duration::from_secs(20);

/// How a kept connection fares.
#[derive(Debug, Clone, Copy, Default)]
struct KeptConnection {
    /// The pod's.
    port: u16,
    echoes: u64,
    /// The longest time that an echo has taken.
    slowest: Duration,
    /// When it sent the message that is not answered yet.
    waits_since: Option<Instant>,
    ended: Option<ErrorKind>,
}

/// A new connection: when it began, and the address that the world saw.
#[derive(Debug, Clone, Copy)]
struct Call {
    began: Instant,
    seen: Result<IpAddr, ErrorKind>,
    /// Another pod has had its port towards this server. The server may still have that connection, in the state TIME-WAIT: then
    /// the new one depends on NAT entries that know of it.
    port_of_another: bool,
}

#[derive(Default)]
struct CallRecords {
    kept: Vec<KeptConnection>,
    calls: Vec<Call>,
    /// The number of the pod that has had this port towards this server first, of all new connections so far.
    ports: BTreeMap<(SocketAddr, u16), usize>,
}

/// What a crowd has lived through since it was asked last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionReport {
    pub(crate) kept: usize,
    /// Connections that ended.
    pub(crate) ended: usize,
    /// Those among them whose port no other pod has towards the server: only one of two can show it to the world.
    pub(crate) ended_alone: usize,
    pub(crate) echoes: u64,
    pub(crate) slowest: Duration,
    pub(crate) calls: usize,
    pub(crate) failed: usize,
    /// Those among them whose port no other pod has had towards the server.
    pub(crate) failed_alone: usize,
    /// From the first one among these to the last one.
    pub(crate) failing_for: Duration,
    /// New connections that were seen with another address than the connections's.
    pub(crate) strange: usize,
}

impl ConnectionReport {
    /// Of an update within one layout of the maps (docs/operations/drain-and-upgrade.md). So many segments of kept connections were
    /// sent again.
    pub(crate) fn ensure_nothing_lost(&self, sent_again: u64) -> Result<()> {
        ensure!(self.kept > 1_000 && self.echoes > self.kept as u64, "too few to say anything: {self:?}");
        ensure!(self.ended == 0, "{} of {} connections ended", self.ended, self.kept);
        ensure!(self.slowest < STALLED, "a connection stalled for {:?}", self.slowest);
        ensure!(self.calls > 100 && self.failed == 0, "{} of {} new connections failed", self.failed, self.calls);
        ensure!(self.strange == 0, "{} new connections had another address", self.strange);
        // A machine that is late makes a kernel send again what is not lost. A gap of a hundredth of a second would be more.
        ensure!(sent_again < 10, "{sent_again} segments were sent again");
        Ok(())
    }
}

/// The callers; they end with this value.
pub(crate) struct Callers {
    records: Arc<Mutex<CallRecords>>,
    callers: Vec<Background<()>>,
    pods: Vec<Netns>,
    servers: Vec<IpAddr>,
    egress: Vec<IpAddr>,
}

impl Callers {
    /// Each of these pods keeps `count` connections, to the server's addresses by turns, and makes a new one `every` so often.
    /// When this returns all kept ones have been answered.
    pub(crate) fn gather(
        pods: Vec<Netns>,
        count: usize,
        every: Duration,
        servers: &[IpAddr],
        egress: &[IpAddr],
    ) -> Result<Self> {
        let records =
            CallRecords { kept: vec![KeptConnection::default(); count * pods.len()], ..CallRecords::default() };
        let records = Arc::new(Mutex::new(records));
        let mut callers = Vec::new();
        for (number, pod) in pods.iter().enumerate() {
            let records = Arc::clone(&records);
            let servers = servers.to_vec();
            callers.push(Background::start_in(pod, move |stop| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    for place in number * count..(number + 1) * count {
                        let to = SocketAddr::new(by_turns(&servers, place), ECHO_PORT);
                        tokio::spawn(keep(to, place, SPEAKS.mul_f64(fraction(place, count)), Arc::clone(&records)));
                    }
                    let stopped = async {
                        while !stop.load(Ordering::Relaxed) {
                            sleep(Duration::from_millis(10)).await;
                        }
                    };
                    tokio::select! { () = call(number, &servers, every, &records) => {}, () = stopped => {} }
                });
                Ok(())
            })?);
        }
        let connections = Self { records, callers, pods, servers: servers.to_vec(), egress: egress.to_vec() };
        let answered = poll(GIVEN_UP, || Ok(connections.lock().kept.iter().all(|one| one.echoes > 0).then_some(())))?;
        ensure!(answered.is_some(), "not all connections have been answered");
        Ok(connections)
    }

    fn lock(&self) -> MutexGuard<'_, CallRecords> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets earlier results, except ended connections.
    pub(crate) fn begin(&self) {
        let mut records = self.lock();
        records.calls.clear();
        for one in &mut records.kept {
            (one.echoes, one.slowest) = (0, Duration::ZERO);
        }
    }

    /// Since [`begin`](Self::begin). What waits for its answer counts as slow as it is by now.
    fn report(&self) -> ConnectionReport {
        let records = self.lock();
        let (kept, calls) = (&records.kept, &records.calls);
        let port = |(place, one): (usize, &KeptConnection)| (by_turns(&self.servers, place), one.port);
        let mut ports: BTreeMap<_, usize> = BTreeMap::new();
        kept.iter().enumerate().for_each(|one| *ports.entry(port(one)).or_default() += 1);
        let ended = || kept.iter().enumerate().filter(|(_, one)| one.ended.is_some());
        let slowness =
            |one: &KeptConnection| one.slowest.max(one.waits_since.map_or(Duration::ZERO, |since| since.elapsed()));
        let failed = || calls.iter().filter(|call| call.seen.is_err());
        let alone: Vec<Instant> = failed().filter(|call| !call.port_of_another).map(|call| call.began).collect();
        let failing_for =
            alone.iter().max().zip(alone.iter().min()).map_or(Duration::ZERO, |(last, first)| *last - *first);
        ConnectionReport {
            kept: kept.len(),
            ended: ended().count(),
            ended_alone: ended().filter(|one| ports[&port(*one)] == 1).count(),
            echoes: kept.iter().map(|one| one.echoes).sum(),
            slowest: kept.iter().filter(|one| one.ended.is_none()).map(slowness).max().unwrap_or_default(),
            calls: calls.len(),
            failed: failed().count(),
            failed_alone: alone.len(),
            failing_for,
            strange: calls.iter().filter(|call| call.seen.is_ok_and(|seen| !self.egress.contains(&seen))).count(),
        }
    }

    /// When all new connections have been answered, or have failed.
    pub(crate) fn settled(&self) -> ConnectionReport {
        std::thread::sleep(PATIENCE);
        self.report()
    }

    /// Segments of kept connections that the pods' kernels have sent again, since the connections began.
    pub(crate) fn sent_again(&self) -> Result<u64> {
        let mut all = 0;
        for pod in &self.pods {
            let text = pod.exec("ss", &["-tinOH", "state", "established", "dport", "=", &format!(":{ECHO_PORT}")])?;
            let of_line = |line: &str| -> Result<u64> {
                let Some(field) = line.split_whitespace().find_map(|word| word.strip_prefix("retrans:")) else {
                    return Ok(0);
                };
                let (_, total) = field.split_once('/').with_context(|| format!("what ss says: {line}"))?;
                Ok(total.parse()?)
            };
            all += text.lines().map(of_line).sum::<Result<u64>>()?;
        }
        Ok(all)
    }

    pub(crate) fn finish(self) -> Result<()> {
        Background::finish_all(self.callers)
    }
}

/// The server's address for a connection.
fn by_turns(servers: &[IpAddr], number: usize) -> IpAddr {
    servers[number % servers.len()]
}

/// Which part of the time between two messages a connection begins at, so that they do not all speak at once.
fn fraction(place: usize, count: usize) -> f64 {
    let part = u32::try_from(place % count).unwrap_or(0);
    f64::from(part) / f64::from(u32::try_from(count).unwrap_or(1))
}

async fn keep(to: SocketAddr, place: usize, behind: Duration, records: Arc<Mutex<CallRecords>>) {
    sleep(behind).await;
    let Err(error) = talk(to, place, &records).await;
    lock(&records).kept[place].ended = Some(error.kind());
}

async fn talk(
    to: SocketAddr,
    place: usize,
    records: &Mutex<CallRecords>,
) -> Result<std::convert::Infallible, io::Error> {
    let mut stream = timeout(GIVEN_UP, TcpStream::connect(to)).await??;
    stream.set_nodelay(true)?;
    lock(records).kept[place].port = stream.local_addr()?.port();
    for number in 0_u64.. {
        let sent = Instant::now();
        lock(records).kept[place].waits_since = Some(sent);
        stream.write_all(&number.to_be_bytes()).await?;
        let mut echo = [0; 8];
        timeout(GIVEN_UP, stream.read_exact(&mut echo)).await??;
        if echo != number.to_be_bytes() {
            return Err(ErrorKind::InvalidData.into());
        }
        {
            let one = &mut lock(records).kept[place];
            (one.echoes, one.slowest, one.waits_since) = (one.echoes + 1, one.slowest.max(sent.elapsed()), None);
        }
        sleep(SPEAKS.saturating_sub(sent.elapsed())).await;
    }
    Err(ErrorKind::Other.into())
}

/// New connections of the pod with this number, to the server's addresses by turns, for as long as it is let.
async fn call(pod: usize, servers: &[IpAddr], every: Duration, records: &Arc<Mutex<CallRecords>>) {
    let mut ticks = interval(every);
    // A machine that is late is late: what it would have asked in between says nothing.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    for number in 0.. {
        ticks.tick().await;
        let (records, to) = (Arc::clone(records), SocketAddr::new(by_turns(servers, number), HTTP_PORT));
        tokio::spawn(async move {
            let began = Instant::now();
            let mut port_of_another = false;
            let asked = async {
                let socket = bound(to)?;
                let port = socket.local_addr()?.port();
                port_of_another = *lock(&records).ports.entry((to, port)).or_insert(pod) != pod;
                ask(socket, to).await
            };
            let asked = timeout(PATIENCE, asked).await;
            let seen = asked.unwrap_or_else(|_late| Err(ErrorKind::TimedOut.into())).map_err(|error| error.kind());
            lock(&records).calls.push(Call { began, seen, port_of_another });
        });
    }
}

/// With a port, which is known before there is a connection.
fn bound(to: SocketAddr) -> io::Result<TcpSocket> {
    let (socket, any) = match to {
        SocketAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
        SocketAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
    };
    socket.bind((any, 0).into())?;
    Ok(socket)
}

/// The address that the server sees.
async fn ask(socket: TcpSocket, to: SocketAddr) -> io::Result<IpAddr> {
    let mut stream = socket.connect(to).await?;
    stream.write_all(format!("GET / HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let sent = answer.lines().last().and_then(|line| line.trim().parse().ok());
    sent.ok_or_else(|| ErrorKind::UnexpectedEof.into())
}

fn lock(records: &Mutex<CallRecords>) -> MutexGuard<'_, CallRecords> {
    records.lock().unwrap_or_else(PoisonError::into_inner)
}
