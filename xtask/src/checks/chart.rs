//! The Helm chart in deploy/helm, made of the manifests that kustomize uses, so that both have one source.
//!
//! A template is the text of a manifest with its comments. Names and namespaces become expressions wherever they stand, and each
//! [`Edit`] makes one thing a value of the chart; one that no longer finds its text is an error. What charts have and kustomize does
//! not (helpers, values, ConfigMaps) is written by hand. A test renders both and compares them (crates/lab/tests/apiserver/helm.rs).

use std::fs;

use anyhow::{Context, Result, ensure};
use regex::{Captures, Regex};

use egress_toolchain::Paths;

/// One text for another.
struct Edit {
    from: &'static str,
    to: String,
    /// How often it is there.
    times: usize,
}

fn edit(from: &'static str, to: impl Into<String>) -> Edit {
    edits(1, from, to)
}

fn edits(times: usize, from: &'static str, to: impl Into<String>) -> Edit {
    Edit { from, to: to.into(), times }
}

/// What every template begins with.
const VARIABLES: &str = "{{- $name := include \"egress-agent.fullname\" . }}\n\
                         {{- $namespace := include \"egress-agent.namespace\" . }}\n";

/// The image, of so many containers.
fn image(times: usize) -> [Edit; 2] {
    let policy = "imagePullPolicy: {{ .Values.image.pullPolicy }}\n";
    [
        edits(times, "image: egress-agent\n", "image: {{ include \"egress-agent.image\" . }}\n"),
        edits(times, "imagePullPolicy: IfNotPresent\n", policy),
    ]
}

/// A field of a pod with a value that is a list or an object, and is left out if that is empty.
fn field_of_pod(field: &str, value: &str) -> String {
    format!(
        "      {{{{- with .Values.{value} }}}}\n      {field}:\n        {{{{- toYaml . | nindent 8 }}}}\n      {{{{- end }}}}\n"
    )
}

const AGENT_PRIORITY: &str = "      priorityClassName: system-node-critical\n";
const CONTROLLER_PRIORITY: &str = "      priorityClassName: system-cluster-critical\n";

/// The priority and the pull secrets, of agents or of controllers.
fn placement(of: &str) -> String {
    let secrets = field_of_pod("imagePullSecrets", "imagePullSecrets");
    format!("      priorityClassName: {{{{ .Values.{of}.priorityClassName }}}}\n{secrets}")
}

/// More labels of the nodes where they run.
fn node_selector(of: &str) -> Edit {
    const OS: &str = "      nodeSelector:\n        kubernetes.io/os: linux\n";
    edit(
        OS,
        format!(
            "{OS}        {{{{- with .Values.{of}.nodeSelector }}}}\n        {{{{- toYaml . | nindent 8 }}}}\n        {{{{- end }}}}\n"
        ),
    )
}

const ALL_TOLERATIONS: &str = "      tolerations:\n      - operator: Exists\n";

const SE_LINUX: &str = "          {{- with .Values.seLinuxType }}\n          seLinuxOptions:\n            type: {{ . }}\n          {{- end }}\n";

const SECCOMP: &str = "          seccompProfile:\n            type: RuntimeDefault\n";
const SECCOMP_OF_VALUES: &str =
    "          seccompProfile:\n            {{- toYaml .Values.agent.seccompProfile | nindent 12 }}\n";

/// The chart's labels are those of kustomize and Helm's own; pods have the first alone, so that a new chart replaces none.
const POD_LABELS: &str = "      labels:\n        app.kubernetes.io/name: egress-agent\n";
const POD_LABELS_OF_BOTH: &str =
    "      labels:\n        app.kubernetes.io/name: egress-agent\n        app.kubernetes.io/part-of: egress-agent\n";

const CHECKSUMS: &str =
    "      annotations:\n        checksum/configuration: {{ include \"egress-agent.checksum\" . }}\n";

pub(super) fn access() -> Result<String> {
    template(None, &["base/rbac.yaml"], [])
}

pub(super) fn roles() -> Result<String> {
    let aggregated = edit(
        "  name: egress-agent-edit\n",
        "  name: egress-agent-edit\n  labels:\n    {{- include \"egress-agent.labels\" . | nindent 4 }}\n    \
         {{- if .Values.roles.aggregateEdit }}\n    rbac.authorization.k8s.io/aggregate-to-edit: \"true\"\n    {{- end }}\n",
    );
    template(None, &["base/roles.yaml"], [aggregated])
}

pub(super) fn admission() -> Result<String> {
    template(None, &["base/admission.yaml"], [])
}

pub(super) fn flow_control() -> Result<String> {
    template(None, &["base/flowcontrol.yaml"], [])
}

pub(super) fn security_context_constraints() -> Result<String> {
    template(Some(".Values.openshift.enabled"), &["overlays/ovn-kubernetes-openshift/scc.yaml"], [])
}

pub(super) fn pod_monitor() -> Result<String> {
    let labelled = edit(
        "kind: PodMonitor\nmetadata:\n  name: egress-agent\n",
        "kind: PodMonitor\nmetadata:\n  name: egress-agent\n  labels:\n    {{- include \"egress-agent.monitoringLabels\" . | nindent 4 }}\n",
    );
    let token =
        edit("        name: egress-agent-metrics\n", "        name: {{ include \"egress-agent.metricsSecret\" . }}\n");
    template(Some(".Values.monitoring.enabled"), &["monitoring/operator/podmonitor.yaml"], [labelled, token])
}

pub(super) fn agents() -> Result<String> {
    let (container, volumes) = plugin("overlays/bridge-cni/cni.yaml")?;
    let text = joined(&["base/daemonset.yaml"])?;
    let mounter = manifest("mount-bpffs/daemonset.yaml")?;
    let mounter = mounter.split_once("      initContainers:\n").context("no initContainers")?.1;
    let log = manifest("nat-log/daemonset.yaml")?;
    let log = log.split_once("        volumeMounts:\n").context("no volumeMounts")?.1;
    let (log_mounts, log_volumes) = log.split_once("      volumes:\n").context("no volumes")?;
    let if_log = |text: &str| format!("      {{{{- if .Values.natLog.enabled }}}}\n{text}      {{{{- end }}}}\n");
    let if_plugin = |text: &str| format!("      {{{{- if .Values.cniPlugin.enabled }}}}\n{text}      {{{{- end }}}}\n");
    let (before, after) = text.split_once("      volumes:\n").context("no volumes")?;
    let text = [
        before,
        &if_log(log_mounts),
        &if_plugin(&container),
        "      volumes:\n",
        after,
        &if_plugin(&volumes),
        &if_log(log_volumes),
    ]
    .concat();
    let own = [
        edit(POD_LABELS, POD_LABELS_OF_BOTH),
        edit("      annotations:\n", CHECKSUMS),
        edit(" docs/install.md has the patch.\n", "\n"),
        edit("      maxUnavailable: 1\n", "      maxUnavailable: {{ .Values.agent.maxUnavailable }}\n"),
        edit(AGENT_PRIORITY, placement("agent")),
        node_selector("agent"),
        edit(ALL_TOLERATIONS, field_of_pod("tolerations", "agent.tolerations")),
        edits(2, "        securityContext:\n", format!("        securityContext:\n{SE_LINUX}")),
        // A privileged container has no SELinux type of its own.
        edit(
            "      containers:\n",
            format!(
                "      {{{{- if .Values.bpffs.mount }}}}\n      initContainers:\n{mounter}      {{{{- end }}}}\n      containers:\n"
            ),
        ),
        edit(
            "          # The runtime's default profile must allow bpf(2) with the capability BPF; docs/install.md covers older ones.\n          \
             seccompProfile:\n            type: RuntimeDefault\n",
            format!("          # It must allow bpf(2) with the capability BPF.\n{SECCOMP_OF_VALUES}"),
        ),
        edit(
            "          requests:\n            cpu: 100m\n            # Map memory is charged to the agent, which creates the maps.\n            \
             memory: 256Mi\n",
            "          # Map memory is charged to the agent, which creates the maps.\n          {{- toYaml .Values.agent.resources | nindent 10 }}\n",
        ),
        edit(TLS, TLS_OF_VALUES),
        edit(TOKEN, TOKEN_OF_VALUES),
        // The socket's directory is the host's for the plugin.
        edit(
            "        emptyDir:\n          medium: Memory\n          sizeLimit: 1Mi\n",
            "        {{- if .Values.cniPlugin.enabled }}\n        hostPath:\n          path: /run/egress-agent\n          \
             type: DirectoryOrCreate\n        {{- else }}\n        emptyDir:\n          medium: Memory\n          \
             sizeLimit: 1Mi\n        {{- end }}\n",
        ),
        edit(CNI_CONF, CNI_CONF_OF_VALUES),
        edit(CNI_BIN, CNI_BIN_OF_VALUES),
    ];
    let sources =
        ["base/daemonset.yaml", "overlays/bridge-cni/cni.yaml", "mount-bpffs/daemonset.yaml", "nat-log/daemonset.yaml"];
    from_text(Some("not .Values.cleanup.enabled"), &sources, &text, own.into_iter().chain(image(3)))
}

pub(super) fn controllers() -> Result<String> {
    let text = joined(&["base/controller.yaml"])?;
    let (before, rest) = text.split_once("      tolerations:\n").context("no tolerations")?;
    // The values have the same, with the comments.
    let (_, after) =
        rest.split_once("      # It releases the Lease and ends.\n").context("no end of the tolerations")?;
    let text = format!(
        "{before}{}      # It releases the Lease and ends.\n{after}",
        field_of_pod("tolerations", "controller.tolerations")
    );
    let own = [
        edit("  replicas: 2\n", "  replicas: {{ .Values.controller.replicas }}\n"),
        edit(POD_LABELS, POD_LABELS_OF_BOTH),
        edit("      annotations:\n", CHECKSUMS),
        edit(CONTROLLER_PRIORITY, placement("controller")),
        node_selector("controller"),
        edit(
            "          value: \":9478\"\n",
            "          value: {{ printf \"%s:9478\" (include \"egress-agent.metricsAddress\" .) | quote }}\n",
        ),
        edit(
            MAKES_TOKEN,
            format!(
                "        {{{{- if and .Values.metrics.exposed (not .Values.metrics.tokenSecret) }}}}\n{MAKES_TOKEN}        {{{{- end }}}}\n"
            ),
        ),
        edit(
            "          requests:\n            cpu: 100m\n            memory: 128Mi\n",
            "          {{- toYaml .Values.controller.resources | nindent 10 }}\n",
        ),
        edit(TLS, TLS_OF_VALUES),
        edit(TOKEN, TOKEN_OF_VALUES),
    ];
    from_text(None, &["base/controller.yaml"], &text, own.into_iter().chain(image(1)))
}

const TLS: &str = "          secretName: egress-agent-healthcheck-tls\n";
const TLS_OF_VALUES: &str =
    "          secretName: {{ .Values.healthCheckTLSSecret | default (printf \"%s-healthcheck-tls\" $name) }}\n";
const TOKEN: &str = "          secretName: egress-agent-metrics\n";
const TOKEN_OF_VALUES: &str = "          secretName: {{ include \"egress-agent.metricsSecret\" . }}\n";
const MAKES_TOKEN: &str = "        # Creates the Secret egress-agent-metrics, unless there is one.\n        - name: EGRESS_AGENT_CREATE_METRICS_TOKEN\n          \
                           value: \"true\"\n";
const CNI_CONF: &str = "          path: /etc/cni/net.d\n";
const CNI_CONF_OF_VALUES: &str = "          path: {{ .Values.cniPlugin.confDir }}\n";
const CNI_BIN: &str = "          path: /opt/cni/bin\n";
const CNI_BIN_OF_VALUES: &str = "          path: {{ .Values.cniPlugin.binDir }}\n";

pub(super) fn cleanup() -> Result<String> {
    let (_, volumes) = plugin("overlays/cleanup-bridge-cni/cni.yaml")?;
    let text = joined(&["cleanup/daemonset.yaml"])?;
    let text = format!("{text}      {{{{- if .Values.cniPlugin.enabled }}}}\n{volumes}      {{{{- end }}}}\n");
    let account = "      automountServiceAccountToken: false\n      {{- if .Values.openshift.enabled }}\n      \
                   serviceAccountName: {{ $name }}\n      {{- end }}\n";
    let own = [
        // The chart's labels have these.
        edit(
            "  labels:\n    app.kubernetes.io/name: egress-agent\n    app.kubernetes.io/part-of: egress-agent\nspec:\n",
            "spec:\n",
        ),
        edit("      automountServiceAccountToken: false\n", account),
        edit(AGENT_PRIORITY, placement("agent")),
        node_selector("agent"),
        edit(ALL_TOLERATIONS, field_of_pod("tolerations", "agent.tolerations")),
        edit("        securityContext: &security\n", format!("        securityContext: &security\n{SE_LINUX}")),
        edit(SECCOMP, SECCOMP_OF_VALUES),
        edit(
            "        - name: bpffs\n          mountPath: /bpf\n",
            "        - name: bpffs\n          mountPath: /bpf\n        {{- if .Values.cniPlugin.enabled }}\n        \
             - name: cni-conf\n          mountPath: /host/net.d\n        - name: cni-bin\n          mountPath: /host/bin\n        {{- end }}\n",
        ),
        edit(CNI_CONF, CNI_CONF_OF_VALUES),
        edit(CNI_BIN, CNI_BIN_OF_VALUES),
    ];
    let sources = ["cleanup/daemonset.yaml", "overlays/cleanup-bridge-cni/cni.yaml"];
    from_text(Some(".Values.cleanup.enabled"), &sources, &text, own.into_iter().chain(image(2)))
}

pub(super) fn router_access() -> Result<String> {
    template(Some(".Values.egressRouter.controller.enabled"), &["egress-router/controller/rbac.yaml"], [])
}

pub(super) fn router() -> Result<String> {
    let sources = ["egress-router/base/daemonset.yaml", "egress-router/configmaps/rbac.yaml"];
    let with_account = "      {{- if .Values.egressRouter.plugin.configMaps }}\n      automountServiceAccountToken: true\n      \
                        serviceAccountName: egress-router\n      {{- else }}\n      automountServiceAccountToken: false\n      {{- end }}\n";
    let text = format!(
        "{}{{{{- if .Values.egressRouter.plugin.configMaps }}}}\n---\n{}{{{{- end }}}}\n",
        joined(&sources[..1])?,
        joined(&sources[1..])?
    );
    let own = [
        edit(AGENT_PRIORITY, format!("{AGENT_PRIORITY}{}", field_of_pod("imagePullSecrets", "imagePullSecrets"))),
        edit(
            "        app.kubernetes.io/name: egress-router\n        app.kubernetes.io/component: install\n    spec:\n",
            "        app.kubernetes.io/name: egress-router\n        app.kubernetes.io/component: install\n        \
             app.kubernetes.io/part-of: egress-agent\n      annotations:\n        \
             checksum/configuration: {{ include \"egress-agent.routerSettings\" . | sha256sum }}\n    spec:\n",
        ),
        edit("      automountServiceAccountToken: false\n", with_account),
        edit(
            "        args: [install]\n",
            "        args: [{{ if .Values.cleanup.enabled }}uninstall{{ else }}install{{ end }}]\n",
        ),
        edit(
            "        args: [install, --stay]\n",
            "        args: [{{ if .Values.cleanup.enabled }}uninstall{{ else }}install{{ end }}, --stay]\n",
        ),
        edit(CNI_CONF, "          path: {{ .Values.egressRouter.plugin.confDir }}\n"),
        edit(CNI_BIN, "          path: {{ .Values.egressRouter.plugin.binDir }}\n"),
    ];
    from_text(Some(".Values.egressRouter.plugin.enabled"), &sources, &text, own.into_iter().chain(image(2)))
}

/// The alerts as an object of the Prometheus Operator.
pub(super) fn prometheus_rule() -> Result<String> {
    let mut text = String::from(
        "# Generated by `cargo xtask codegen` from deploy/monitoring/alerts.yaml.\napiVersion: monitoring.coreos.com/v1\n\
         kind: PrometheusRule\nmetadata:\n  name: egress-agent\n  namespace: egress-agent\nspec:\n",
    );
    for line in manifest("monitoring/alerts.yaml")?.lines().skip_while(|line| line.starts_with('#')) {
        text += &format!("{}{line}\n", if line.is_empty() { "" } else { "  " });
    }
    Ok(text)
}

/// A file that a template includes unchanged. Alert rules have `{{ }}` of their own.
pub(super) fn copied(path: &str) -> Result<String> {
    manifest(path)
}

fn manifest(path: &str) -> Result<String> {
    let path = Paths::find()?.root.join("deploy").join(path);
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

fn joined(paths: &[&str]) -> Result<String> {
    let texts = paths.iter().map(|path| manifest(path)).collect::<Result<Vec<_>>>()?;
    Ok(texts.join("---\n"))
}

/// The container of the CNI plugin in a patch, and the volumes that it adds, with their lists' indentation.
fn plugin(path: &str) -> Result<(String, String)> {
    let text = manifest(path)?;
    let (rest, volumes) = text.split_once("      volumes:\n").context("no volumes")?;
    let container = rest.split_once("      containers:\n").context("no containers")?.1;
    let own =
        volumes.find("      # The container runtime's directories").or_else(|| volumes.find("      - name: cni-conf"));
    Ok((container.to_owned(), volumes[own.context("no volumes of the plugin")?..].to_owned()))
}

fn template(condition: Option<&str>, sources: &[&str], own: impl IntoIterator<Item = Edit>) -> Result<String> {
    from_text(condition, sources, &joined(sources)?, own)
}

fn from_text(
    condition: Option<&str>,
    sources: &[&str],
    text: &str,
    own: impl IntoIterator<Item = Edit>,
) -> Result<String> {
    let mut text = text.to_owned();
    for one in own {
        let found = text.matches(one.from).count();
        ensure!(found == one.times, "{}: {found} times, not {}: {:?}", sources.join(", "), one.times, one.from);
        text = text.replace(one.from, &one.to);
    }
    let origin: Vec<String> = sources.iter().map(|path| format!("deploy/{path}")).collect();
    let head = format!("{{{{- /* Generated by `cargo xtask codegen` from {}. */}}}}\n", origin.join(", "));
    let text = labelled(&named(&text)?);
    Ok(match condition {
        Some(condition) => format!("{head}{{{{- if {condition} }}}}\n{VARIABLES}{text}{{{{- end }}}}\n"),
        None => format!("{head}{VARIABLES}{text}"),
    })
}

/// The names of objects and of the namespace, wherever a field has one or the name of an account contains them.
fn named(text: &str) -> Result<String> {
    let field =
        Regex::new(r"(?m)^( *(?:- )?)(name|policyName|serviceAccountName|namespace): egress-(agent|router)(-\S+)?$")?;
    let text = field.replace_all(text, |found: &Captures| {
        let rest = found.get(4).map_or("", |rest| rest.as_str());
        let value = match (&found[2], &found[3]) {
            ("namespace", _) => "{{ $namespace }}",
            (_, "agent") => "{{ $name }}",
            _ => "{{ .Values.egressRouter.plugin.name }}",
        };
        format!("{}{}: {value}{rest}", &found[1], &found[2])
    });
    let text = text.replace("namespaces: [egress-agent]", "namespaces: [{{ $namespace }}]");
    Ok(text.replace(
        "system:serviceaccount:egress-agent:egress-agent",
        "system:serviceaccount:{{ $namespace }}:{{ $name }}",
    ))
}

/// Each object with the chart's labels, unless an edit has given it some.
fn labelled(text: &str) -> String {
    let labels = "{{- include \"egress-agent.labels\" . | nindent 4 }}";
    let documents = text.split("---\n").map(|document| {
        let metadata = document.split("\nmetadata:\n").nth(1).and_then(|rest| rest.split("\nspec:").next());
        let has_own = metadata.is_some_and(|metadata| metadata.contains("nindent 4 }}"));
        match metadata.is_some_and(|metadata| metadata.contains("\n  labels:\n")) {
            _ if has_own => document.to_owned(),
            true => document.replacen("\n  labels:\n", &format!("\n  labels:\n    {labels}\n"), 1),
            false => document.replacen("\nmetadata:\n", &format!("\nmetadata:\n  labels:\n    {labels}\n"), 1),
        }
    });
    documents.collect::<Vec<_>>().join("---\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_expressions_and_what_the_programs_assume_stays() {
        let text = "metadata:\n  name: egress-agent-controller\n  namespace: egress-agent\n  labels:\n    \
                    app.kubernetes.io/name: egress-agent\nresourceNames: [egress-agent-leader]\n\
                    - name: egress-router\n'system:serviceaccount:egress-agent:egress-agent-controller'\n";
        let wanted = "metadata:\n  name: {{ $name }}-controller\n  namespace: {{ $namespace }}\n  labels:\n    \
                      app.kubernetes.io/name: egress-agent\nresourceNames: [egress-agent-leader]\n\
                      - name: {{ .Values.egressRouter.plugin.name }}\n\
                      'system:serviceaccount:{{ $namespace }}:{{ $name }}-controller'\n";
        assert_eq!(named(text).expect("an expression"), wanted);
    }

    #[test]
    fn an_edit_that_finds_nothing_is_an_error() {
        let lost = from_text(None, &["a.yaml"], "a: 1\n", [edit("b: 1\n", "b: 2\n")]);
        let error = lost.expect_err("it is not there").to_string();
        assert!(error.contains("a.yaml: 0 times, not 1"), "{error}");
    }

    #[test]
    fn every_object_has_labels_once() {
        let text = "kind: A\nmetadata:\n  name: a\n---\nkind: B\nmetadata:\n  name: b\n  labels:\n    x: y\nspec: {}\n";
        let made = labelled(text);
        assert_eq!(made.matches("egress-agent.labels").count(), 2, "{made}");
        assert_eq!(made.matches("  labels:\n").count(), 2, "{made}");
        assert_eq!(labelled(&made), made);
    }
}
