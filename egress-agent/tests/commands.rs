//! The program in a given environment: exit codes, messages, and its use of proxies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

const PROXY: &str = "http://proxy.invalid:3128";

fn agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_egress-agent"));
    command.env_clear();
    command
}

/// Exit code and error output.
fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A file that is removed with the value.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, text: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

fn kubeconfig(server: SocketAddr, more: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{token: t}}}}],
        contexts: [{{name: c, context: {{cluster: k, user: u}}}}],
        clusters: [{{name: k, cluster: {{server: 'http://{server}'{more}}}}}]}}"
    )
}

/// Answers one request with 404, and returns its first line.
fn empty_server() -> (SocketAddr, thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    let address = listener.local_addr().expect("bound");
    let request = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let (mut request, mut buffer) = (Vec::new(), [0; 1024]);
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            match stream.read(&mut buffer).expect("a request") {
                0 => break,
                length => request.extend_from_slice(&buffer[..length]),
            }
        }
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(answer.as_bytes()).expect("the client waits for the answer");
        String::from_utf8_lossy(&request).lines().next().unwrap_or_default().to_owned()
    });
    (address, request)
}

/// As `kubectl exec --stdin` leaves it when its connection is gone: nothing is dropped, so nothing is written either.
#[test]
fn a_follower_of_drops_ends_with_its_input() {
    let socket = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("follower-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&socket).expect("a socket");
    let _removed = TempFile(socket.clone());
    // An agent: its names, and then no drops.
    let (asked, asks) = channel();
    thread::spawn(move || {
        let (mut names, _) = listener.accept().expect("a request for names");
        let read = names.read(&mut [0; 1024]).expect("a request");
        let answer = br#"{"names":{"node":null,"pods":{},"objects":{},"nodes":{}}}"#;
        names.write_all(answer).expect("it waits for the answer");
        assert!(read > 0);
        drop(names);
        asked.send(listener.accept().expect("a request for drops").0).expect("the test waits");
    });
    let mut command = agent();
    command.args(["drops", "--follow", "--end-with-stdin", "--socket"]).arg(&socket).stdin(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let _connection = asks.recv_timeout(Duration::from_secs(30)).expect("both requests");
    ends_with_its_input(child);
}

#[test]
fn a_status_that_is_watched_ends_with_its_input() {
    let mut command = agent();
    command.args(["status", "--watch=3600", "--end-with-stdin", "--socket", "/nowhere", "--bpffs", "/nowhere"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // Without an agent it says so, and waits for the next time.
    let mut line = String::new();
    BufReader::new(child.stderr.take().expect("a pipe")).read_line(&mut line).expect("text");
    assert!(line.starts_with("error: no agent runs here"), "{line}");
    ends_with_its_input(child);
}

fn ends_with_its_input(mut child: Child) {
    assert_eq!(child.try_wait().expect("it can be asked"), None, "its input is open");
    drop(child.stdin.take());
    let ended = (0..3_000).find_map(|_| {
        thread::sleep(Duration::from_millis(10));
        child.try_wait().expect("it can be asked")
    });
    if ended.is_none() {
        child.kill().expect("it runs");
    }
    assert!(ended.is_some_and(|ended| ended.success()), "{ended:?}");
}

#[test]
fn a_proxy_of_the_environment_is_not_used() {
    for is_named in [true, false] {
        let (address, request) = empty_server();
        let file = TempFile::new("kubeconfig", &kubeconfig(address, ""));
        let mut command = agent();
        command.args(["drain", "missing"]).envs([("HTTPS_PROXY", PROXY), ("https_proxy", PROXY)]);
        let variable = if is_named { "EGRESS_AGENT_KUBECONFIG" } else { "KUBECONFIG" };
        let output = command.env(variable, &file.0).output().expect("it starts");
        let (code, text) = ended(&output);
        assert_eq!(code, Some(1), "{text}");
        // Before the wait for the request, which may not have been sent.
        assert!(!text.contains("proxy"), "{text}");
        let request = request.join().expect("no panic");
        assert!(request.contains("/api/v1/nodes/missing"), "{request}; {text}");
    }
}

#[test]
fn a_proxy_of_the_kubeconfig_is_refused_in_one_line() {
    let no_server = SocketAddr::from(([127, 0, 0, 1], 1));
    let file = TempFile::new("proxied", &kubeconfig(no_server, &format!(", proxy-url: '{PROXY}'")));
    let (code, text) =
        ended(&agent().args(["drain", "missing", "--kubeconfig"]).arg(&file.0).output().expect("it starts"));
    assert_eq!((code, text.lines().count()), (Some(1), 1), "{text}");
    assert!(text.starts_with("error: the kubeconfig has the proxy http://proxy.invalid:3128"), "{text}");
}

#[test]
fn wrong_usage_has_its_own_exit_code_and_a_wrong_file_is_one_line() {
    let usage = ended(&agent().args(["run", "--node-name=a", "--tunnel-port=0"]).output().expect("it starts"));
    assert_eq!(usage.0, Some(2), "{}", usage.1);
    assert!(usage.1.starts_with("error: ") && usage.1.contains("--tunnel-port"), "{}", usage.1);
    let file = TempFile::new("conf", "[ovnkubernetesfeature]\negressip-node-healthcheck-port=many\n");
    let output = agent().args(["run", "--node-name=a", "--config-file"]).arg(&file.0).output().expect("it starts");
    let (code, text) = ended(&output);
    assert_eq!((code, text.lines().count()), (Some(1), 1), "{text}");
    assert!(text.contains(&format!("{}:2: ", file.0.display())), "{text}");
}
