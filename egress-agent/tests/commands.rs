//! The program as it is started, with an environment of its own: how it ends, and by what it goes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;

const PROXY: &str = "http://proxy.invalid:3128";

fn agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_egress-agent"));
    command.env_clear();
    command
}

/// Code, and what it says of what is wrong.
fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A file that goes with the test.
struct Written(PathBuf);

impl Written {
    fn new(name: &str, text: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        Self(path)
    }
}

impl Drop for Written {
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

/// Has nothing of what it is asked for; says for what.
fn empty_server() -> (SocketAddr, thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
    let address = listener.local_addr().expect("bound");
    let asked = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody asks");
        let (mut request, mut buffer) = (Vec::new(), [0; 1024]);
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            match stream.read(&mut buffer).expect("a request") {
                0 => break,
                length => request.extend_from_slice(&buffer[..length]),
            }
        }
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(answer.as_bytes()).expect("who asks waits for the answer");
        String::from_utf8_lossy(&request).lines().next().unwrap_or_default().to_owned()
    });
    (address, asked)
}

#[test]
fn a_proxy_of_the_environment_is_not_asked() {
    for is_named in [true, false] {
        let (address, asked) = empty_server();
        let file = Written::new("kubeconfig", &kubeconfig(address, ""));
        let mut command = agent();
        command.args(["drain", "nobody"]).envs([("HTTPS_PROXY", PROXY), ("https_proxy", PROXY)]);
        let variable = if is_named { "EGRESS_AGENT_KUBECONFIG" } else { "KUBECONFIG" };
        let output = command.env(variable, &file.0).output().expect("it starts");
        let (code, said) = ended(&output);
        assert_eq!(code, Some(1), "{said}");
        // Before who asked is waited for: it may have asked nobody.
        assert!(!said.contains("proxy"), "{said}");
        let asked = asked.join().expect("no panic");
        assert!(asked.contains("/api/v1/nodes/nobody"), "{asked}; {said}");
    }
}

#[test]
fn a_proxy_of_the_kubeconfig_is_refused_in_one_line() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    let file = Written::new("proxied", &kubeconfig(nobody, &format!(", proxy-url: '{PROXY}'")));
    let (code, said) =
        ended(&agent().args(["drain", "nobody", "--kubeconfig"]).arg(&file.0).output().expect("it starts"));
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with("error: the kubeconfig has the proxy http://proxy.invalid:3128"), "{said}");
}

#[test]
fn wrong_usage_has_a_code_of_its_own_and_a_wrong_file_is_a_line() {
    let usage = ended(&agent().args(["run", "--node-name=a", "--tunnel-port=0"]).output().expect("it starts"));
    assert_eq!(usage.0, Some(2), "{}", usage.1);
    assert!(usage.1.starts_with("error: ") && usage.1.contains("--tunnel-port"), "{}", usage.1);
    let file = Written::new("conf", "[ovnkubernetesfeature]\negressip-node-healthcheck-port=many\n");
    let output = agent().args(["run", "--node-name=a", "--config-file"]).arg(&file.0).output().expect("it starts");
    let (code, said) = ended(&output);
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains(&format!("{}:2: ", file.0.display())), "{said}");
}
