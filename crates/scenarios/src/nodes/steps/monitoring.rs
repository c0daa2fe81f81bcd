//! Prometheus itself scrapes the nodes by the job of deploy/monitoring/README.md, and takes the alert rules. The distribution's
//! Prometheus has no discovery of Kubernetes: the targets that it would find are given to it.

use super::*;
use crate::nodes::processes::Processes;
use egress_lab::wait::until_equal;
use egress_toolchain::{Paths, prometheus};

const LISTEN: &str = "127.0.0.1:9090";
/// Where a pod has the token, in the document.
const TOKEN: &str = "/etc/prometheus/secrets/egress-agent-metrics/token";
const PORT_NAME: &str = "__meta_kubernetes_pod_container_port_name";
/// Until all targets have been found and scraped.
const SCRAPED: Duration = Duration::from_secs(3 * 10);

pub(super) fn prometheus_scrapes(test: &mut NodeTest) -> Result<()> {
    let program = prometheus::program("prometheus", &Paths::find()?, &Progress::start())?;
    let cluster = &test.cluster;
    let folder = &cluster.shell.folder;
    let file = |name: &str| folder.join(name).display().to_string();
    let token = "kubectl -n egress-agent get secret egress-agent-metrics -o jsonpath='{.data.token}' | base64 -d";
    fs::write(file("prometheus-token"), cluster.shell.exec("sh", &["-c", token])?)?;
    let page = fs::read_to_string(folder.join("deploy/monitoring/README.md"))?;
    let job = page.split_once("```yaml\nscrape_configs:").and_then(|(_, rest)| rest.split_once("```"));
    let (job, _) = job.context("the document shows no job")?;
    let discovery =
        job.split_once("  kubernetes_sd_configs:").and_then(|(_, rest)| rest.split_once("  relabel_configs:"));
    let (discovery, _) = discovery.context("the document's job discovers nothing")?;
    ensure!(
        job.contains(TOKEN) && discovery.contains("names: [egress-agent]"),
        "the document shows another job: {job}"
    );
    let static_targets = format!(" {}\n", json!([{"targets": targets_of(cluster)?, "labels": {PORT_NAME: "metrics"}}]));
    let job = job.replace(TOKEN, &file("prometheus-token")).replace("kubernetes_sd_configs:", "static_configs:");
    let job = job.replace(discovery, &static_targets);
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\nscrape_configs:{job}",
        file("deploy/monitoring/alerts.yaml")
    );
    fs::write(file("prometheus.yaml"), config)?;
    let arguments = [
        format!("--config.file={}", file("prometheus.yaml")),
        format!("--storage.tsdb.path={}", file("prometheus")),
        format!("--web.listen-address={LISTEN}"),
    ];
    let mut processes = Processes::default();
    processes.spawn(cluster.shell.netns(), folder.join("prometheus.log"), &program, &arguments, &[])?;

    let asked = |path: &str| -> Result<Value> {
        let text = cluster.shell.exec("curl", &["--silent", "--fail", &format!("http://{LISTEN}/api/v1/{path}")])?;
        Ok(serde_json::from_str::<Value>(&text)?["data"].clone())
    };
    let targets = || -> Result<BTreeMap<String, String>> {
        let found = asked("targets?state=active")?;
        let target = |one: &Value| {
            let url = one["scrapeUrl"].as_str().unwrap_or_default().to_owned();
            (
                url,
                format!(
                    "{} {}",
                    one["health"].as_str().unwrap_or_default(),
                    one["lastError"].as_str().unwrap_or_default()
                ),
            )
        };
        Ok(found["activeTargets"].as_array().into_iter().flatten().map(target).collect())
    };
    let pages = until("both agents and both controllers are scraped", SCRAPED, || {
        processes.ensure_alive()?;
        // It does not listen at once.
        let Ok(found) = targets() else { return Ok(None) };
        Ok((found.len() == 4 && found.values().all(|state| state == "up ")).then_some(found))
    })?;
    println!("{pages:#?}");
    let value = |expression: &str| -> Result<String> {
        let query = format!("query={expression}");
        let address = format!("http://{LISTEN}/api/v1/query");
        let arguments = ["--silent", "--fail", "--get", "--data-urlencode", &query, &address];
        let found: Value = serde_json::from_str(&cluster.shell.exec("curl", &arguments)?)?;
        Ok(found["data"]["result"][0]["value"][1].as_str().unwrap_or_default().to_owned())
    };
    for (expression, wanted) in [
        ("sum(egress_agent_serving)", "2"),
        ("sum(egress_agent_leader)", "1"),
        ("sum(egress_agent_egressip_objects{reason=\"Assigned\"})", "1"),
    ] {
        until_equal(expression, &wanted.to_owned(), || value(expression))?;
    }

    // Not one waits for its time to pass, either. Before the first scrape some do.
    let quiet = until_true("all rules work, and no alert is pending or fires", SCRAPED, || {
        let groups = asked("rules")?["groups"].as_array().cloned().unwrap_or_default();
        let rules = groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect::<Vec<_>>();
        let works = |rule: &&Value| rule["health"] == "ok" && rule["alerts"].as_array().is_none_or(Vec::is_empty);
        Ok(rules.len() > 10 && rules.iter().all(works))
    });
    quiet.with_context(|| format!("rules: {:#}", asked("rules").unwrap_or_default()))
}

/// What discovery by pods finds of ports with the name that the job keeps.
fn targets_of(cluster: &RealCluster) -> Result<Vec<String>> {
    let pods = cluster.list(&["--namespace=egress-agent", "pods"])?;
    let mut targets = Vec::new();
    for pod in pods {
        let address = pod["status"]["podIP"].as_str().context("a pod without an address")?;
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        let ports = containers.filter_map(|one| one["ports"].as_array()).flatten();
        targets.extend(
            ports.filter(|port| port["name"] == "metrics").map(|port| format!("{address}:{}", port["containerPort"])),
        );
    }
    Ok(targets)
}
