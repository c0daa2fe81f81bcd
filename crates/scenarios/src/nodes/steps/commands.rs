//! Commands of the documents that need a kubelet: in pods, by the kubectl plugin, and those of break-glass.md.

use super::*;
use egress_lab::topology::addresses::SERVER;

const IMAGE: &str = "localhost/egress-agent:0.1.0";

/// docs/operations/kubectl-plugin.md, every command.
pub(super) fn plugin(test: &mut NodeTest) -> Result<()> {
    let (gateway, other) = test.gateway_and_other()?;
    let shell = &test.cluster.shell;
    let near = test.selected_on(&gateway)?;
    let far = test.selected_on(other)?;
    let http = SocketAddr::new(SERVER.v4.into(), HTTP_PORT).to_string();
    let values_of = |pod: &RealPod, node: &str| {
        let names = [("NS/NAME", format!("{}/{}", pod.house, pod.name)), ("NODE", node.to_owned())];
        names.into_iter().chain([("ADDRESS:PORT", http.clone())]).collect::<Vec<_>>()
    };
    let typed = |line: &str, pod: &RealPod, node: &str| {
        let values = values_of(pod, node);
        let values: Vec<_> = values.iter().map(|(word, value)| (*word, value.as_str())).collect();
        shell.types(line, &values)
    };
    let shows = |printed: &str, words: &[&str]| -> Result<()> {
        let missing: Vec<_> = words.iter().filter(|word| !printed.contains(**word)).collect();
        ensure!(missing.is_empty(), "it does not show {missing:?}");
        Ok(())
    };

    let printed = typed("kubectl egress status --node NODE", near, &gateway)?;
    shows(&printed, &[&gateway, OBJECT, &EGRESS_IP.to_string()])?;
    let printed = typed("kubectl egress status --pod NS/NAME -- -o json", far, other)?;
    let status: Value = serde_json::from_str(&printed).context("the status is no JSON")?;
    let node = &status["cluster"]["node"];
    ensure!(node == other, "that is the status of {node}");

    let connection = TrafficFlow::tcp(&far.netns, SocketAddr::new(SERVER.v4.into(), ECHO_PORT), EFFECT / 10, EFFECT)?;
    let printed = until("the connection has a mapping", EFFECT, || {
        let printed = typed("kubectl egress nat --pod NS/NAME", far, other)?;
        Ok(printed.contains(&ECHO_PORT.to_string()).then_some(printed))
    })?;
    shows(&printed, &[&EGRESS_IP.to_string()])?;
    shows(&typed("kubectl egress nat count --node NODE", far, &gateway)?, &[&EGRESS_IP.to_string()])?;

    // What firewalls see: the entry of the server's log.
    let mark = test.cluster.server.log().mark();
    let reply = client::get(&far.netns, SocketAddr::new(SERVER.v4.into(), HTTP_PORT), "/", "who")??;
    ensure!(reply.seen_as()? == EGRESS_IP, "the pod is not seen with {EGRESS_IP}");
    let seen = test.cluster.server.log().since(mark);
    let seen = seen.iter().find(|one| one.user_agent == "who").context("no entry")?.client.to_string();
    let printed = shell.types(&format!("kubectl egress who ADDRESS:PORT --to {http}"), &[("ADDRESS:PORT", &seen)])?;
    shows(&printed, &[OBJECT, &gateway, &format!("{}/{}", far.house, far.name), other])?;
    shows(&shell.types("kubectl egress who ADDRESS:PORT", &[("ADDRESS:PORT", &seen)])?, &[&far.name])?;
    connection.finish()?;

    let printed = typed("kubectl egress trace NS/NAME ADDRESS:PORT", far, other)?;
    let answer = format!("leaves {gateway} from {EGRESS_IP}");
    shows(&printed, &[&format!("{other}: to_gateway"), &format!("{gateway}: snat_for_node"), &answer])?;
    let printed = typed("kubectl egress trace NS/NAME ADDRESS:PORT -o json", near, &gateway)?;
    let trace: Value = serde_json::from_str(&printed).context("the trace is no JSON")?;
    ensure!(trace["leaves_with_egress_ip"] == true, "the trace says {trace}");
    let printed = typed("kubectl egress trace NS/NAME ADDRESS:PORT", &test.others[0], &gateway)?;
    shows(&printed, &["not_selected"])?;

    drops(test, far, &gateway)?;

    let target = [("ADDRESS:PORT", http.as_str()), ("NAME", OBJECT), ("NAMESPACE", SELECTED)];
    shell.types("kubectl egress check --target ADDRESS:PORT --object NAME -n NAMESPACE", &target)?;
    let printed =
        shell.types("kubectl egress check --target ADDRESS:PORT --object NAME -n NAMESPACE --http", &target)?;
    shows(&printed, &[&EGRESS_IP.to_string()])?;
    let left = test.cluster.list(&["pods", "-A", "-l", "app.kubernetes.io/name=egress-check"])?;
    ensure!(left.iter().all(|pod| !pod["metadata"]["deletionTimestamp"].is_null()), "pods are left: {left:?}");

    bundle(test)?;

    shell.types("kubectl egress drain NODE", &[("NODE", &gateway)])?;
    test.is_served_by(other, EFFECT)?;
    shell.types("kubectl egress drain NODE --undo", &[("NODE", &gateway)])?;
    test.all_are_right()
}

/// A pod's packets to the tunnel port are dropped. When the command is interrupted, it ends in the agent's pod too.
fn drops(test: &NodeTest, pod: &RealPod, gateway: &str) -> Result<()> {
    const TUNNEL_PORT: u16 = 4794;
    let shell = &test.cluster.shell;
    let name = format!("{}/{}", pod.house, pod.name);
    let overlay = SocketAddr::new(test.cluster.node(gateway)?.lab.number.address().v4.into(), TUNNEL_PORT);
    let forged = TrafficFlow::udp(&pod.netns, overlay, Duration::from_millis(50))?;
    let line = "timeout --signal=INT 5 kubectl egress drops --pod NS/NAME -- --follow";
    let (code, printed) = shell.types_to_its_end(line, &[("NS/NAME", &name)])?;
    forged.finish()?;
    ensure!(code.is_some_and(|code| code != 0), "it has ended by itself");
    ensure!(printed.contains("forged_tunnel") && printed.contains(&name), "it shows no drop of {name}");
    until_true("the command has ended on the nodes", EFFECT, || {
        let left = test.cluster.nodes().iter().map(|node| Ok(node.agents("drops")?.len())).sum::<Result<usize>>()?;
        Ok(left == 0)
    })
}

fn bundle(test: &NodeTest) -> Result<()> {
    let shell = &test.cluster.shell;
    shell.types("kubectl egress bundle --file bundle.tar.gz", &[])?;
    let listed = shell.exec("tar", &["-tzf", "bundle.tar.gz"])?;
    for part in ["summary.json", "nodes/node1", "nodes/node2", "logs", "objects"] {
        ensure!(listed.contains(part), "{part} is not in the bundle: {listed}");
    }
    let all = shell.exec("tar", &["-xzOf", "bundle.tar.gz"])?;
    let key = test.cluster.get(&["-n", "egress-agent", "secret", "egress-agent-key"])?;
    for (name, value) in key["data"].as_object().context("a Secret without data")? {
        ensure!(!all.contains(value.as_str().unwrap_or_default()), "{name} of the Secret is in the bundle");
    }
    let node = test.cluster.get(&["node", "node1"])?;
    let version = node["status"]["nodeInfo"]["kubeletVersion"].as_str().context("a node without a version")?;
    ensure!(
        all.contains(OBJECT) && all.contains(version),
        "neither {OBJECT} nor {version} may be missing in the bundle"
    );
    Ok(())
}

/// docs/troubleshooting.md, "Where to run commands": in a pod of an agent, without the API server, and beside an agent that does not
/// run.
pub(super) fn debug_pod(test: &mut NodeTest) -> Result<()> {
    let shell = &test.cluster.shell;
    let image = r#"kubectl -n egress-agent get daemonset egress-agent -o jsonpath='{.spec.template.spec.containers[?(@.name=="agent")].image}{"\n"}'"#;
    let image = shell.types(image, &[])?;
    ensure!(image.trim() == IMAGE, "the DaemonSet has the image {image}");
    let line = r#"ctr -n k8s.io tasks exec --exec-id egress-status $(ctr -n k8s.io containers list --quiet 'labels."io.kubernetes.pod.namespace"==egress-agent,labels."io.kubernetes.container.name"==agent') egress-agent status"#;
    let status = test.cluster.node("node2")?.exec(&["sh", "-c", line])?;
    println!("{status}");
    ensure!(status.contains("node2") && status.contains("running for"), "that is not the status of node2's agent");
    let pod = test.cluster.agent_pod("node2")?;
    let status = shell.types("kubectl -n egress-agent exec POD -- egress-agent status", &[("POD", name_of(&pod))])?;
    ensure!(status.contains("node2"), "that is not the status of node2");
    let line = "kubectl -n egress-agent debug node/NODE -it --profile=sysadmin --image=IMAGE -- egress-agent status --bpffs /host/sys/fs/bpf/egress-agent";
    shell.types_to_its_end(line, &[("NODE", "node2"), ("IMAGE", IMAGE)])?;
    let printed = output_of_debug_pod(test)?;
    ensure!(printed.contains("from_pod"), "it shows no programs");
    Ok(())
}

/// kubectl shows the output of a command only if it attaches in time. The pod is deleted.
fn output_of_debug_pod(test: &NodeTest) -> Result<String> {
    let shell = &test.cluster.shell;
    let name = until("the command in the debug pod has ended", KUBERNETES, || {
        let pods = test.cluster.list(&["-n", "egress-agent", "pods"])?;
        let debugger = pods.into_iter().find(|pod| name_of(pod).starts_with("node-debugger-"));
        let debugger = debugger.context("there is no debug pod")?;
        let has_ended = matches!(debugger["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        Ok(has_ended.then(|| name_of(&debugger).to_owned()))
    })?;
    let printed = shell.types("kubectl -n egress-agent logs POD", &[("POD", &name)])?;
    shell.types("kubectl -n egress-agent delete pod POD", &[("POD", &name)])?;
    Ok(printed)
}

/// docs/operations/break-glass.md, from the first step to the last.
pub(super) fn break_glass(test: &mut NodeTest) -> Result<()> {
    see_and_stop_one_object(test)?;
    take_one_node_out(test)?;
    freeze(test)?;
    stop_everywhere(test)
}

fn see_and_stop_one_object(test: &NodeTest) -> Result<()> {
    let shell = &test.cluster.shell;
    shell.types("kubectl -n egress-agent get pods -o wide", &[])?;
    let pod = test.cluster.agent_pod("node1")?;
    let name = format!("{SELECTED}/{}", test.selected_on("node1")?.name);
    let to = SocketAddr::new(SERVER.v4.into(), HTTP_PORT).to_string();
    let values = [("NS/NAME", name.as_str()), ("ADDRESS:PORT", &to), ("POD", name_of(&pod))];
    let line = "kubectl -n egress-agent exec POD -- egress-agent trace --pod NS/NAME --to ADDRESS:PORT";
    let printed = shell.types(line, &values)?;
    ensure!(printed.contains("snat_here") || printed.contains("to_gateway"), "the trace has another verdict");

    shell.types("kubectl get egressip NAME -o yaml > NAME.yaml", &[("NAME", OBJECT)])?;
    shell.types("kubectl delete egressip NAME", &[("NAME", OBJECT)])?;
    test.nothing_is_selected()?;
    // What the page says is to be removed before.
    let file = shell.folder.join(format!("{OBJECT}.yaml"));
    let mut object: Value = serde_yaml::from_str(&fs::read_to_string(&file)?)?;
    object["status"].take();
    for (place, field) in [("/metadata", "uid"), ("/metadata", "resourceVersion")] {
        object.pointer_mut(place).and_then(Value::as_object_mut).context("no metadata")?.remove(field);
    }
    if let Some(annotations) = object.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) {
        annotations.remove("k8s.ovn.org/egressip-tunnel-id");
    }
    object.as_object_mut().context("no object")?.remove("status");
    fs::write(&file, serde_yaml::to_string(&object)?)?;
    shell.types("kubectl apply -f NAME.yaml", &[("NAME", OBJECT)])?;
    test.all_are_right()
}

fn take_one_node_out(test: &NodeTest) -> Result<()> {
    let (gateway, out) = test.gateway_and_other()?;
    let shell = &test.cluster.shell;
    let values = [("NODE", out), ("IMAGE", IMAGE), ("INTERFACE", "cni0")];
    shell.types("kubectl label node NODE egress-agent-off=", &values)?;
    shell.types(r#"kubectl -n egress-agent patch daemonset egress-agent --type json -p '[{"op":"add","path":"/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions/-","value":{"key":"egress-agent-off","operator":"DoesNotExist"}}]'"#, &[])?;
    rolled_out(&test.cluster, "daemonset/egress-agent")?;
    until_true(&format!("no agent runs on {out}"), KUBERNETES, || {
        Ok(test.cluster.node(out)?.agents("run")?.is_empty())
    })?;
    // Its programs continue.
    test.all_are_right()?;
    let line = "kubectl -n egress-agent debug node/NODE -it --profile=sysadmin --image=IMAGE -- egress-agent cleanup --bpffs /host/sys/fs/bpf/egress-agent --mgmt-port INTERFACE";
    shell.types(line, &values)?;
    let printed = output_of_debug_pod(test)?;
    ensure!(printed.contains("egress0"), "cleanup has not removed the device");
    let (left, stays) = (test.selected_on(out)?, test.selected_on(&gateway)?);
    test.cluster.is_seen_as(left, left.node)?;
    test.cluster.is_seen_as(stays, EGRESS_IP)?;
    shell.types("kubectl label node NODE egress-agent-off-", &values)?;
    shell.types("kubectl apply -k deploy/overlays/OVERLAY", &[("OVERLAY", "bridge-cni")])?;
    all_rolled_out(&test.cluster)?;
    test.all_are_right()
}

fn freeze(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    let traffic = test.traffic()?;
    cluster.types("kubectl -n egress-agent scale deployment egress-agent-controller --replicas=0")?;
    until_true("no controller runs", KUBERNETES, || {
        Ok(cluster.nodes().iter().map(|node| Ok(node.agents("controller")?.len())).sum::<Result<usize>>()? == 0)
    })?;
    // Longer than the leases of gateways, which they hold by the ledger now.
    std::thread::sleep(Duration::from_secs(5));
    cluster.types("kubectl -n egress-agent scale deployment egress-agent-controller --replicas=2")?;
    rolled_out(cluster, "deployment/egress-agent-controller")?;
    test.all_are_right()?;
    traffic.finish_without_loss().map(drop)
}

fn stop_everywhere(test: &NodeTest) -> Result<()> {
    let shell = &test.cluster.shell;
    let values = [("CLEANUP", "cleanup-bridge-cni"), ("OVERLAY", "bridge-cni")];
    shell.types("kubectl -n egress-agent delete daemonset egress-agent", &values)?;
    shell.types("kubectl apply -k deploy/overlays/CLEANUP", &values)?;
    shell.types("kubectl -n egress-agent rollout status daemonset/egress-agent-cleanup", &values)?;
    shell.types("kubectl -n egress-agent scale deployment egress-agent-controller --replicas=0", &values)?;
    test.nothing_is_selected()?;
    shell.types("kubectl delete -k deploy/overlays/CLEANUP", &values)?;
    shell.types("kubectl apply -k deploy/overlays/OVERLAY", &values)?;
    shell.types("kubectl -n egress-agent rollout status daemonset/egress-agent", &values)?;
    shell.types("kubectl get egressip", &values)?;
    all_rolled_out(&test.cluster)?;
    test.all_are_right()
}

/// Single commands of other pages.
pub(super) fn others(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    // docs/operations/health-check-key.md, "The key".
    let key =
        || -> Result<Value> { Ok(cluster.get(&["-n", "egress-agent", "secret", "egress-agent-key"])?["data"].clone()) };
    let before = key()?;
    let traffic = test.traffic()?;
    cluster.types("kubectl -n egress-agent delete secret egress-agent-key")?;
    cluster.types("kubectl -n egress-agent rollout restart deployment egress-agent-controller")?;
    rolled_out(cluster, "deployment/egress-agent-controller")?;
    until_true("there is another key", EFFECT, || Ok(key().is_ok_and(|now| now != before)))?;
    test.all_are_right()?;
    traffic.finish_without_loss()?;
    metrics(test)?;
    import_routers(test)
}

/// docs/install.md, "Metrics": other hosts and pods read them with the token alone.
fn metrics(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    let address = cluster.node("node1")?.lab.number.address().v4.to_string();
    let is_scraped = || {
        let line = r#"curl --silent --header "Authorization: Bearer $(kubectl -n egress-agent get secret egress-agent-metrics -o jsonpath='{.data.token}' | base64 -d)" http://NODE_ADDRESS:9477/metrics | grep '^egress_agent_serving '"#;
        Ok(cluster.shell.types_to_its_end(line, &[("NODE_ADDRESS", &address)])?.0 == Some(0))
    };
    // As soon as the kubelet has mounted a new Secret.
    until_true("another host reads the metrics", KUBERNETES, is_scraped)?;
    let url = |port: u16| format!("http://{address}:{port}/metrics");
    let token = || -> Result<String> {
        let secret = cluster.get(&["-n", "egress-agent", "secret", "egress-agent-metrics"])?;
        Ok(secret["data"]["token"].as_str().context("no token")?.to_owned())
    };
    let refused = |arguments: &[&str]| -> Result<()> {
        let answer = cluster.shell.exec("curl", &[&["--silent", "--include"], arguments].concat())?;
        ensure!(answer.contains(" 401 ") && !answer.contains("egress_agent_"), "{arguments:?}: {answer}");
        Ok(())
    };
    // What by_kustomize has made: a controller leaves it as it is.
    let former = token()?;
    let typed = "kubectl -n egress-agent get secret egress-agent-metrics -o jsonpath='{.data.token}' | base64 -d";
    ensure!(
        cluster.types(typed)? == fs::read_to_string(cluster.shell.folder.join("token"))?,
        "the token is another one"
    );
    refused(&[&url(9477)])?;
    // The controllers' port, on one of the nodes at least: both may run on one.
    let controllers =
        cluster.nodes().iter().map(|node| format!("http://{}:9478/metrics", node.lab.number.address().v4));
    let asked = controllers.filter(|url| cluster.shell.exec("curl", &["--silent", url]).is_ok()).collect::<Vec<_>>();
    ensure!(!asked.is_empty(), "no controller serves its page");
    asked.iter().try_for_each(|url| refused(&[url]))?;
    let pod = &test.others[0].netns;
    let from_pod = pod.exec("curl", &["--silent", "--include", &url(9477)])?;
    ensure!(from_pod.contains(" 401 ") && !from_pod.contains("egress_agent_"), "a pod reads {from_pod}");
    cluster.types("kubectl -n egress-agent delete secret egress-agent-metrics")?;
    let is_another = || Ok(token().is_ok_and(|token| token != former));
    until_true("the controllers have made another token", KUBERNETES, is_another)?;
    until_true("another host reads the metrics with another token", KUBERNETES, is_scraped)?;
    other_namespace_gets_the_token(cluster)?;
    test.all_are_right()
}

/// deploy/monitoring/README.md, "Prometheus without the Operator".
fn other_namespace_gets_the_token(cluster: &RealCluster) -> Result<()> {
    let values = [("MONITORING", "monitoring"), ("ACCOUNT", "prometheus")];
    cluster.types("kubectl create namespace monitoring")?;
    for line in [
        "kubectl -n egress-agent create role prometheus --verb=get,list,watch --resource=pods",
        "kubectl -n egress-agent create rolebinding prometheus --role=prometheus --serviceaccount=MONITORING:ACCOUNT",
        "kubectl -n egress-agent get secret egress-agent-metrics -o jsonpath='{.data.token}' | base64 -d | kubectl -n MONITORING create secret generic egress-agent-metrics --from-file=token=/dev/stdin --dry-run=client -o yaml | kubectl apply -f -",
    ] {
        cluster.shell.types(line, &values)?;
    }
    let can = |what: &str| {
        let line =
            format!("kubectl auth can-i {what} -n egress-agent --as system:serviceaccount:monitoring:prometheus");
        Ok::<_, anyhow::Error>(cluster.shell.types_to_its_end(&line, &[])?.1.trim() == "yes")
    };
    ensure!(can("list pods")? && !can("get secrets")?, "Prometheus has not the right that it needs, or more than that");
    let token_in = |namespace: &str| -> Result<Value> {
        Ok(cluster.get(&["-n", namespace, "secret", "egress-agent-metrics"])?["data"]["token"].clone())
    };
    ensure!(token_in("monitoring")? == token_in("egress-agent")?, "the copy has another token");
    cluster.types("kubectl -n egress-agent delete rolebinding,role prometheus")?;
    cluster.types("kubectl delete namespace monitoring").map(drop)
}

/// docs/operations/egress-router.md, "Migration": what makes router pods of the OpenShift SDN.
fn import_routers(test: &NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("kubectl apply -f deploy/egress-router/controller/egressrouters.yaml")?;
    let env =
        [("EGRESS_SOURCE", "192.0.2.99/24"), ("EGRESS_GATEWAY", "192.0.2.1"), ("EGRESS_DESTINATION", "203.0.113.25")];
    let env = env.map(|(name, value)| json!({"name": name, "value": value}));
    let labels = json!({"app": "router"});
    let container = |name: &str| json!({"name": name, "image": "localhost/box:1", "env": env});
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "router", "namespace": SELECTED},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {"pod.network.openshift.io/assign-macvlan": "true"}},
                "spec": {"initContainers": [container("egress-router")], "containers": [container("wait")]},
            },
        },
    }))?;
    let line = "kubectl get pods,deployments,configmaps,egressrouters -n NAMESPACE -o yaml | egress-router import > routers.yaml";
    cluster.shell.types(line, &[("NAMESPACE", SELECTED)])?;
    let routers = fs::read_to_string(cluster.shell.folder.join("routers.yaml"))?;
    for part in ["NetworkAttachmentDefinition", "192.0.2.99/24", "203.0.113.25"] {
        ensure!(routers.contains(part), "{part} is not in what was imported:\n{routers}");
    }
    cluster.types(&format!("kubectl -n {SELECTED} delete deployment router"))?;
    cluster.types("kubectl delete -f deploy/egress-router/controller/egressrouters.yaml").map(drop)
}
