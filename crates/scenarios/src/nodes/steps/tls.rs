//! Health checks by TLS, switched on and off again as docs/install.md has it.

use super::*;

const FILE: &str = "deploy/base/agent.conf";
const EMPTY: &str = "client-privkey=\nclient-cert=\nclient-cacert=\ncert-common-name=\n";
const FILLED: &str = "client-cert=/etc/egress-agent/tls/tls.crt\nclient-privkey=/etc/egress-agent/tls/tls.key\n\
                      client-cacert=/etc/egress-agent/tls/ca.crt\ncert-common-name=egress-agent\n";

/// Egress IPs may move meanwhile: processes with and without TLS do not connect.
pub(super) fn health_checks_by_tls(test: &mut NodeTest) -> Result<()> {
    let shell = &test.cluster.shell;
    for line in [
        r#"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=egress-agent CA" -keyout ca.key -out ca.crt"#,
        r#"openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=egress-agent" -addext "subjectAltName=DNS:egress-agent" -addext "extendedKeyUsage=serverAuth,clientAuth" -keyout tls.key -out tls.csr"#,
        "openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -copy_extensions copy -out tls.crt",
        "kubectl -n egress-agent create secret generic egress-agent-healthcheck-tls --from-file=tls.crt --from-file=tls.key --from-file=ca.crt",
    ] {
        shell.types(line, &[])?;
    }
    shell.edit(FILE, EMPTY, FILLED)?;
    apply(test)?;
    let checked = answers_are_by_tls(test).and_then(|()| test.all_are_right());
    test.cluster.shell.edit(FILE, FILLED, EMPTY)?;
    checked?;
    apply(test)?;
    test.cluster.kubectl(&["-n", "egress-agent", "delete", "secret", "egress-agent-healthcheck-tls"])?;
    test.all_are_right()
}

fn apply(test: &NodeTest) -> Result<()> {
    test.cluster.shell.types("kubectl apply -k deploy/overlays/OVERLAY", &[("OVERLAY", "bridge-cni")])?;
    all_rolled_out(&test.cluster)
}

/// Each agent listens with TLS, and the leader's probes are answered: it counts no agent as unreachable.
fn answers_are_by_tls(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    for node in ["node1", "node2"] {
        let pod = cluster.agent_pod(node)?;
        let log = cluster.kubectl(&["-n", "egress-agent", "logs", name_of(&pod)])?;
        let by_tls = |line: &str| line.contains("answering health checks") && line.contains("\"tls\":true");
        ensure!(log.lines().any(by_tls), "the agent of {node} does not say that it answers by TLS");
    }
    until_true("both agents answer the leader", KUBERNETES, || {
        // Of both controllers: the leader alone has the states of agents.
        let pages = cluster.nodes().iter().map(|node| node.exec(&["curl", "--silent", "127.0.0.1:9478/metrics"]));
        let pages = pages.collect::<Result<Vec<_>>>()?.concat();
        let answers = |node: &str| {
            let series = format!("egress_agent_egress_node_state{{node=\"{node}\",state=\"answers\"}} 1");
            pages.lines().any(|line| line == series)
        };
        Ok(answers("node1") && answers("node2"))
    })
}
