//! Requests and streams between a pod and the server outside, by ordinary sockets on threads pinned to one core.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream, UdpSocket};

use super::cpu::{Cores, pin};
use super::peers::SERVER;
use super::plan::{Work, of_family};
use crate::prelude::*;

const ECHO_PORT: u16 = 7000;
const CLOSING_PORT: u16 = 7001;
const SWALLOW_PORT: u16 = 7002;
const POUR_PORT: u16 = 7003;
/// As [`CLOSING_PORT`], on the second core.
pub(super) const CHURN_PORT: u16 = 7004;
const CHUNK: usize = 128 << 10;
/// An answer that takes longer is none.
const PATIENCE: Duration = Duration::from_secs(5);

/// Starts the servers in this namespace, each for both families. Their threads wait in accept and end with the process.
pub(super) fn serve(outside: &Netns, cores: Cores) -> Result<()> {
    let core = cores.first;
    listen(outside, core, ECHO_PORT, |stream| std::thread::spawn(move || echo(stream)).thread().unpark())?;
    // The server closes first, so that waiting for stray packets of the connection is not the client's port's business.
    listen(outside, core, CLOSING_PORT, close)?;
    listen(outside, cores.second.unwrap_or(core), CHURN_PORT, close)?;
    listen(outside, core, SWALLOW_PORT, |stream| std::thread::spawn(move || swallow(stream)).thread().unpark())?;
    listen(outside, core, POUR_PORT, |stream| std::thread::spawn(move || pour(stream)).thread().unpark())?;
    let socket = outside.run(|| Ok(UdpSocket::bind((Ipv6Addr::UNSPECIFIED, ECHO_PORT))?))?;
    std::thread::spawn(move || {
        pin(core)?;
        let mut bytes = [0; 64];
        loop {
            let (length, from) = socket.recv_from(&mut bytes)?;
            socket.send_to(&bytes[..length], from)?;
        }
        #[expect(unreachable_code, reason = "names the type of the closure's errors")]
        Ok::<(), anyhow::Error>(())
    });
    Ok(())
}

fn listen(outside: &Netns, core: usize, port: u16, answer: impl Fn(TcpStream) + Send + 'static) -> Result<()> {
    let listener = outside.run(|| Ok(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?))?;
    std::thread::spawn(move || {
        pin(core)?;
        for stream in listener.incoming() {
            let stream = stream?;
            stream.set_nodelay(true)?;
            answer(stream);
        }
        Ok::<(), anyhow::Error>(())
    });
    Ok(())
}

fn close(mut stream: TcpStream) {
    let mut byte = [0];
    // A client that has gone away is the client's failure to report.
    let _gone = stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte));
}

fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
}

/// Reads to the end and tells how many bytes there were.
fn swallow(mut stream: TcpStream) {
    let mut bytes = vec![0; CHUNK];
    let mut total = 0_u64;
    while let Ok(length) = stream.read(&mut bytes) {
        if length == 0 {
            // The client is waiting for it, or has gone.
            let _gone = stream.write_all(&total.to_be_bytes());
            return;
        }
        total += length as u64;
    }
}

fn pour(mut stream: TcpStream) {
    let bytes = vec![0; CHUNK];
    while stream.write_all(&bytes).is_ok() {}
}

/// Does the work from the pod for so long; how much of it was done in a second.
pub(super) fn measure(work: Work, pod: &Netns, core: usize, time: Duration) -> Result<f64> {
    let server = of_family(SERVER, work.family());
    pod.run(|| {
        pin(core)?;
        match work {
            Work::TcpRr | Work::TcpRr6 => tcp_requests(server, time),
            Work::TcpCrr => connections(server, time),
            Work::UdpRr => datagrams(server, time),
            Work::TcpUp => upload(server, time),
            Work::TcpDown => download(server, time),
            Work::Forwarding
            | Work::Forwarding6
            | Work::Cores
            | Work::Churn
            | Work::Programs
            | Work::Isolation
            | Work::Stalls
            | Work::Limits
            | Work::EgressRouter
            | Work::NatLog => {
                anyhow::bail!("this work needs no sockets")
            }
        }
    })
    .with_context(|| format!("{} from {}", work.name(), pod.name()))
}

pub(super) fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Does `once` again and again for so long; how often in a second.
fn rate(time: Duration, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    let mut count = 0_u32;
    while begin.elapsed() < time {
        once()?;
        count += 1;
    }
    Ok(f64::from(count) / begin.elapsed().as_secs_f64())
}

fn tcp_requests(server: IpAddr, time: Duration) -> Result<f64> {
    let mut stream = connect((server, ECHO_PORT).into())?;
    let mut byte = [7];
    rate(time, || {
        stream.write_all(&byte)?;
        Ok(stream.read_exact(&mut byte)?)
    })
}

fn connections(server: IpAddr, time: Duration) -> Result<f64> {
    let mut byte = [7];
    rate(time, || {
        let mut stream = connect((server, CLOSING_PORT).into())?;
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        ensure!(stream.read(&mut byte)? == 0, "the server says more than it was asked");
        Ok(())
    })
}

fn datagrams(server: IpAddr, time: Duration) -> Result<f64> {
    let any = if server.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((server, ECHO_PORT))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut byte = [7];
    rate(time, || {
        socket.send(&byte)?;
        socket.recv(&mut byte)?;
        Ok(())
    })
}

fn upload(server: IpAddr, time: Duration) -> Result<f64> {
    let mut stream = connect((server, SWALLOW_PORT).into())?;
    let bytes = vec![7; CHUNK];
    let begin = Instant::now();
    while begin.elapsed() < time {
        stream.write_all(&bytes)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut total = [0; 8];
    stream.read_exact(&mut total)?;
    Ok(megabits(u64::from_be_bytes(total), begin))
}

fn download(server: IpAddr, time: Duration) -> Result<f64> {
    let mut stream = connect((server, POUR_PORT).into())?;
    let mut bytes = vec![0; CHUNK];
    let begin = Instant::now();
    let mut total = 0;
    while begin.elapsed() < time {
        let length = stream.read(&mut bytes)?;
        ensure!(length > 0, "the stream has ended");
        total += length as u64;
    }
    Ok(megabits(total, begin))
}

fn megabits(bytes: u64, begin: Instant) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a double has")]
    let bits = (bytes * 8) as f64;
    bits / begin.elapsed().as_secs_f64() / 1e6
}
