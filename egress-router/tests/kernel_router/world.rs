//! A node with two networks outside and one of pods, each end in a namespace of its own:
//!
//! ```text
//! client eth0 --+                       +-- eno1 -- lan0 server   192.168.12.0/24, 2001:db8:12::/64
//!               cni0    node            |
//! router eth0 --+  10.128.6.0/23        +-- eno2 -- lan0 other    192.168.13.0/24
//! ```
//!
//! The servers have 203.0.113.26 and 2001:db8:113::26; the first one is the node's default route.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use egress_lab::{Netns, cni_runtime};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrLike, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use serde_json::{Value, json};

static WORLDS: AtomicU32 = AtomicU32::new(0);
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct World {
    prefix: String,
    names: Vec<&'static str>,
}

/// What a call printed and ended with.
pub(crate) struct Answer {
    pub(crate) is_success: bool,
    pub(crate) json: Value,
    pub(crate) log: String,
}

impl World {
    pub(crate) fn new() -> Self {
        let prefix = format!("er{}-{}", std::process::id(), WORLDS.fetch_add(1, Ordering::Relaxed));
        let mut world = Self { prefix, names: Vec::new() };
        for name in ["node", "router", "client", "server", "other"] {
            world.add(name);
        }
        let ip = |of: &str, line: &str| world.ip(of, line);
        for (port, server, four, six) in
            [("eno1", "server", "192.168.12", "2001:db8:12"), ("eno2", "other", "192.168.13", "")]
        {
            ip("node", &format!("link add {port} type veth peer name lan0 netns {}", world.netns(server).name()));
            for (of, device, host) in [("node", port, 2), (server, "lan0", 1)] {
                ip(of, &format!("addr add {four}.{host}/24 dev {device}"));
                if !six.is_empty() {
                    ip(of, &format!("addr add {six}::{host}/64 dev {device} nodad"));
                }
                ip(of, &format!("link set {device} up"));
            }
            ip(server, "addr add 203.0.113.26/32 dev lo");
            ip(server, "addr add 2001:db8:113::26/128 dev lo nodad");
        }
        ip("node", "route add default via 192.168.12.1");
        ip("node", "route add default via 2001:db8:12::1");
        ip("node", "link add cni0 type bridge");
        ip("node", "addr add 10.128.6.1/23 dev cni0");
        ip("node", "addr add fd01::1/64 dev cni0 nodad");
        ip("node", "link set cni0 up");
        let forwarding = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"].map(|path| (path.to_owned(), "1".to_owned()));
        world.netns("node").sysctl(&forwarding).expect("the node forwards");
        world.attach("router", 47);
        world.attach("client", 48);
        ["node", "router", "client", "server", "other"].iter().for_each(|name| world.until_up(name));
        world
    }

    /// The kernel lets new links send up to a second after both ends are up.
    pub(crate) fn until_up(&self, of: &str) {
        for _ in 0..100 {
            let links = self.netns(of).exec("ip", &["-brief", "link"]).expect("a list");
            if links.lines().all(|line| line.contains("LOOPBACK") || line.contains(" UP ")) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{of} has links that are not up");
    }

    fn add(&mut self, name: &'static str) {
        let netns = self.netns(name);
        run(Command::new("ip").args(["netns", "add", netns.name()])).expect("a namespace");
        self.names.push(name);
        // Its addresses of IPv6 are usable at once.
        netns.sysctl(&[("ipv6/conf/default/accept_dad".to_owned(), "0".to_owned())]).expect("a setting");
        self.ip(name, "link set lo up");
    }

    /// Gives a pod its first interface, as a CNI plugin with a bridge does.
    fn attach(&self, pod: &str, host: u8) {
        let ip = |of: &str, line: &str| self.ip(of, line);
        ip("node", &format!("link add pod{host} type veth peer name eth0 netns {}", self.netns(pod).name()));
        ip("node", &format!("link set pod{host} master cni0 up"));
        ip(pod, &format!("addr add 10.128.6.{host}/23 dev eth0"));
        ip(pod, &format!("addr add fd01::{host}/64 dev eth0 nodad"));
        ip(pod, "link set eth0 up");
        ip(pod, "route add default via 10.128.6.1");
        ip(pod, "route add default via fd01::1");
    }

    /// Another pod.
    pub(crate) fn pod(&mut self, name: &'static str, host: u8) {
        self.add(name);
        self.attach(name, host);
    }

    /// One that a plugin is to attach.
    pub(crate) fn pod_without_interface(&mut self, name: &'static str) {
        self.add(name);
    }

    pub(crate) fn netns(&self, name: &str) -> Netns {
        Netns::new(&self.prefix, name)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.netns(name).path().display().to_string()
    }

    pub(crate) fn ip(&self, of: &str, line: &str) {
        let arguments: Vec<&str> = line.split_whitespace().collect();
        self.netns(of).exec("ip", &arguments).unwrap_or_else(|error| panic!("{of}: ip {line}: {error:#}"));
    }

    pub(crate) fn nft(&self, of: &str, line: &str) {
        self.netns(of).exec("nft", &[line]).unwrap_or_else(|error| panic!("{of}: nft {line}: {error:#}"));
    }

    /// Calls the plugin as a runtime does, with these variables instead of the usual ones or beside them.
    pub(crate) fn call(&self, command: &str, config: &str, variables: &[(&str, &str)]) -> Answer {
        let path = self.path("router");
        let mut all = BTreeMap::from([
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", path.as_str()),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/opt/cni/bin"),
        ]);
        all.extend(variables.iter().copied());
        all.retain(|_, value| !value.is_empty());
        let plugin = Path::new(env!("CARGO_BIN_EXE_egress-router"));
        let output = cni_runtime::call(&self.netns("node"), plugin, &all, config).expect("the plugin runs");
        let text = String::from_utf8(output.stdout).expect("text");
        let json = if text.trim().is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON") };
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        Answer { is_success: output.status.success(), json, log }
    }

    /// A command of an administrator on the node: whether it ends well, and what it says.
    pub(crate) fn command(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let output = self.netns("node").run(|| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_egress-router"));
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn()?;
            let _ended = child.stdin.take().context("a pipe")?.write_all(input.as_bytes());
            Ok(child.wait_with_output()?)
        });
        let output = output.expect("it runs");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    /// ADD that succeeds; its result.
    pub(crate) fn added(&self, config: &Value) -> Value {
        let answer = self.call("ADD", &config.to_string(), &[]);
        assert!(answer.is_success, "{} {}", answer.json, answer.log);
        answer.json
    }

    /// Everything of a namespace that the plugin may change.
    pub(crate) fn snapshot(&self, of: &str) -> String {
        let netns = self.netns(of);
        let mut text = String::new();
        let lines = ["-details link", "addr", "route show table all", "-6 route show table all", "rule", "-6 rule"];
        for line in lines {
            let arguments: Vec<&str> = line.split_whitespace().collect();
            let list = netns.exec("ip", &arguments).expect("a list");
            // Timers of bridges run.
            list.lines().filter(|line| !line.starts_with("    bridge")).for_each(|line| text += &format!("{line}\n"));
        }
        text += &netns.exec("nft", &["list", "ruleset"]).expect("a list");
        let settings = netns.run(|| {
            let mut text = String::new();
            for folder in ["ipv4/conf/all", "ipv4/conf/eth0", "ipv6/conf/all", "ipv6/conf/eth0"] {
                for name in ["forwarding", "rp_filter", "proxy_arp", "accept_ra", "disable_ipv6", "arp_ignore"] {
                    let value = std::fs::read_to_string(format!("/proc/sys/net/{folder}/{name}")).unwrap_or_default();
                    text += &format!("{folder}/{name} {value}");
                }
            }
            Ok(text)
        });
        text + &settings.expect("settings")
    }

    /// Everything of a namespace is as it was; neighbours are not compared, which come by themselves.
    pub(crate) fn assert_as_before(&self, of: &str, before: &str) {
        let after = self.snapshot(of);
        let lines = |one: &str, other: &str| {
            let other: Vec<&str> = other.lines().collect();
            one.lines().filter(|line| !other.contains(line)).collect::<Vec<_>>().join("\n")
        };
        assert!(after == before, "{of} lacks:\n{}\nand has:\n{}", lines(before, &after), lines(&after, before));
    }

    /// A server in a namespace that tells each client its address. It ends with the test.
    pub(crate) fn serve(&self, of: &str, at: &str) -> Server {
        self.server(of, at, |mut stream| {
            if let Ok(peer) = stream.peer_addr() {
                let _gone = stream.write_all(peer.ip().to_string().as_bytes());
            }
        })
    }

    fn server(&self, of: &str, at: &str, answer: impl Fn(TcpStream) + Send + 'static) -> Server {
        let address: SocketAddr = at.parse().expect("an address and a port");
        let listener = self.netns(of).run(|| TcpListener::bind(address).context("bind")).expect("a server");
        let stop = listener.try_clone().expect("a copy");
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                answer(stream);
            }
        });
        Server { stop, thread: Some(thread) }
    }

    /// A server that sends back what it gets.
    pub(crate) fn echo(&self, of: &str, at: &str) -> Server {
        self.server(of, at, |mut stream| {
            let mut byte = [0];
            while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
        })
    }

    /// Sends a byte and waits for it, so often, in one connection.
    pub(crate) fn turns(&self, from: &str, to: &str, count: u32) {
        let address: SocketAddr = to.parse().expect("an address and a port");
        let done = self.netns(from).run(|| {
            let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            for _ in 0..count {
                stream.write_all(&[1])?;
                stream.read_exact(&mut [0])?;
            }
            Ok(())
        });
        done.expect("every byte comes back");
    }

    /// Connects from a namespace; what the server says its client is.
    pub(crate) fn connect(&self, from: &str, to: &str) -> Result<IpAddr, std::io::Error> {
        let address: SocketAddr = to.parse().expect("an address and a port");
        let said = self.netns(from).run(|| {
            Ok((|| {
                let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                Ok::<_, std::io::Error>(text)
            })())
        });
        Ok(said.expect("the namespace is there")?.parse().expect("an address"))
    }
}

impl World {
    /// Sends a datagram to a server that answers it; what the server saw as its source.
    pub(crate) fn ask(&self, from: &str, to: &str, (server, at): (&str, &str)) -> Result<IpAddr, io::Error> {
        let (to, at): (SocketAddr, SocketAddr) = (to.parse().expect("a socket"), at.parse().expect("a socket"));
        let server = self.netns(server).run(|| Ok(UdpSocket::bind(at)?)).expect("a server");
        server.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let asker = self.netns(from).run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?)).expect("a socket");
        asker.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let answering = std::thread::spawn(move || {
            let mut bytes = [0; 8];
            let (_, source) = server.recv_from(&mut bytes)?;
            server.send_to(&[], source)?;
            Ok::<_, io::Error>(source.ip())
        });
        asker.connect(to)?;
        asker.send(&[1])?;
        // A port that is closed is an error here; the server waits in vain then.
        asker.recv(&mut [0; 8])?;
        answering.join().expect("it does not panic")
    }
}

/// What a process binds its socket to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound<'a> {
    Address(&'a str),
    Device(&'a str),
}

impl World {
    /// As [`World::connect`], by a process that chooses where its packets leave; a timeout is [`io::ErrorKind::WouldBlock`].
    pub(crate) fn connect_bound(&self, from: &str, bound: Bound<'_>, to: &str) -> Result<IpAddr, io::Error> {
        let to = SockaddrStorage::from(to.parse::<SocketAddr>().expect("an address and a port"));
        let said = self.netns(from).run(|| {
            Ok((|| {
                let family = to.family().unwrap_or(AddressFamily::Inet);
                let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
                setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(PATIENCE.as_secs().cast_signed(), 0))?;
                match bound {
                    Bound::Address(text) => {
                        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(address(text), 0)))?;
                    }
                    Bound::Device(name) => setsockopt(&socket, sockopt::BindToDevice, &name.into())?,
                }
                connect(socket.as_raw_fd(), &to)?;
                let (mut stream, mut text) = (TcpStream::from(socket), String::new());
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.read_to_string(&mut text)?;
                Ok::<_, io::Error>(text)
            })())
        });
        Ok(address(&said.expect("the namespace is there")?))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for name in &self.names {
            let _gone = run(Command::new("ip").args(["netns", "del", self.netns(name).name()]));
        }
    }
}

pub(crate) struct Server {
    stop: TcpListener,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends the wait for clients.
        let _ended = nix::sys::socket::shutdown(self.stop.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        self.thread.take().map(JoinHandle::join);
    }
}

fn run(command: &mut Command) -> Result<Output> {
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}

/// A configuration of a router with these addresses.
pub(crate) fn config(addresses: &[&str], more: Value) -> Value {
    let mut ip = json!({"addresses": addresses});
    ip.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    json!({"cniVersion": "1.1.0", "name": "r", "type": "egress-router", "clusterNetworks": ["10.128.0.0/14", "fd01::/48"], "ip": ip})
}

/// One of both families that redirects port 8080 to port 80 of the server.
pub(crate) fn usual() -> Value {
    let redirect = ["8080 tcp 203.0.113.26 80", "8080 tcp [2001:db8:113::26]:80"];
    config(&["192.168.12.99/24", "2001:db8:12::99/64"], json!({"redirect": redirect}))
}

pub(crate) fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}
