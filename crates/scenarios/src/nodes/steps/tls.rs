//! Health checks by TLS, switched on and off again as docs/install.md has it.

use super::*;

const FILE: &str = "deploy/base/agent.conf";
const EMPTY: &str = "client-privkey=\nclient-cert=\nclient-cacert=\ncert-common-name=\n";
const FILLED: &str = "client-cert=/etc/egress-agent/tls/tls.crt\nclient-privkey=/etc/egress-agent/tls/tls.key\n\
                      client-cacert=/etc/egress-agent/tls/ca.crt\ncert-common-name=egress-agent\n";

/// Egress IPs may move during the rollout: processes with and without TLS do not connect.
pub(super) fn health_checks_by_tls(test: &mut NodeTest) -> Result<()> {
    // The leader probes nodes that may be gateways.
    test.gateway_and_other()?;
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
    let checked = apply(test)
        .and_then(|()| answers_are_by_tls(test))
        .and_then(|()| test.all_are_right())
        .and_then(|()| renew(test));
    // Also after a failure: other tests stand on the same cluster.
    test.cluster.shell.edit(FILE, FILLED, EMPTY)?;
    apply(test)?;
    test.cluster.kubectl(&["-n", "egress-agent", "delete", "secret", "egress-agent-healthcheck-tls"])?;
    checked?;
    test.all_are_right()
}

fn apply(test: &NodeTest) -> Result<()> {
    test.cluster.shell.types("kubectl apply -k deploy/overlays/OVERLAY", &[("OVERLAY", "bridge-cni")])?;
    all_rolled_out(&test.cluster)
}

/// Another certificate in the Secret is used without a restart, as soon as the kubelet has mounted it.
fn renew(test: &NodeTest) -> Result<()> {
    test.cluster.types("openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -copy_extensions copy -out tls.crt")?;
    test.cluster.types("kubectl -n egress-agent create secret generic egress-agent-healthcheck-tls --from-file=tls.crt --from-file=tls.key --from-file=ca.crt --dry-run=client -o yaml | kubectl apply -f -")?;
    let logs =
        ["-n", "egress-agent", "logs", "-l", "app.kubernetes.io/component=agent", "--container=agent", "--tail=-1"];
    until_true("both agents have read it", KUBERNETES, || {
        let log = test.cluster.kubectl(&logs)?;
        Ok(log.lines().filter(|line| line.contains("of health checks were reloaded")).count() == 2)
    })?;
    test.all_are_right()
}

/// Each agent listens with TLS, and answers of both count: the leader's probes alone make them so.
fn answers_are_by_tls(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    let logs = "kubectl -n egress-agent logs -l app.kubernetes.io/component=agent --container agent --prefix --tail=-1 | grep 'answering health checks'";
    // A line for each address, after the name of the pod.
    let printed = cluster.types(logs)?;
    let agents: BTreeSet<_> = printed.lines().filter_map(|line| line.split_once(' ')).map(|(pod, _)| pod).collect();
    let by_tls = printed.lines().all(|line| line.contains("\"tls\":true"));
    ensure!(by_tls && agents.len() == 2, "not both agents say that they answer by TLS");
    // Of both controllers: the leader alone probes.
    let answers = || -> Result<BTreeMap<String, f64>> {
        let pages = cluster.nodes().iter().map(|node| node.exec(&["curl", "--silent", "127.0.0.1:9478/metrics"]));
        let pages = pages.collect::<Result<Vec<_>>>()?.concat();
        let probes = pages
            .lines()
            .filter_map(|line| line.strip_prefix("egress_agent_probes_total{answer=\"")?.split_once("\"} "));
        let mut counts = BTreeMap::new();
        for (answer, count) in probes {
            *counts.entry(answer.to_owned()).or_default() += count.parse::<f64>()?;
        }
        Ok(counts)
    };
    let of = |counts: &BTreeMap<String, f64>, answer: &str| counts.get(answer).copied().unwrap_or_default();
    let before = answers()?;
    // Two nodes, each probed several times a second.
    until_true("probes are answered by TLS", KUBERNETES, || {
        Ok(of(&answers()?, "serving") > of(&before, "serving") + 20.0)
    })?;
    let (begin, rest) = (answers()?, Duration::from_secs(5));
    std::thread::sleep(rest);
    let end = answers()?;
    for (answer, count) in end.iter().filter(|(answer, _)| *answer != "serving") {
        ensure!(of(&begin, answer) == *count, "in {rest:?} probes had the answer {answer}: {begin:?}, {end:?}");
    }
    ensure!(of(&end, "serving") > of(&begin, "serving"), "no probe is answered: {begin:?}, {end:?}");
    Ok(())
}
