//! `cargo xtask codegen`: files in the clone that are generated from code.
//!
//! The code is the truth and the file is for readers and for `kubectl apply`, so each file is written whole, or a part
//! of it between two marker lines. `--check` writes nothing and names every file that differs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use egress_common::abi::{Class, Verdict};

use super::chart;
use egress_scenarios::bench;
use egress_toolchain::{BuildArgs, Built, Paths, Progress, ensure_built, output};

#[derive(Args, Debug)]
pub(crate) struct CodegenArgs {
    /// Write nothing; fail and name the files that differ from what would be written
    #[arg(long)]
    pub(crate) check: bool,
}

/// Where the text goes.
enum TextPlace {
    /// The whole file.
    Whole,
    /// Between the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->` of a file that a person writes.
    Between(&'static str),
}

struct Generated {
    path: &'static str,
    place: TextPlace,
    text: fn(&Built) -> Result<String>,
}

/// What the figures of the documents were measured as: `results.json` of a run of `cargo xtask bench`.
const RESULTS: &str = include_str!("../../../docs/performance.json");

/// Every generated file.
fn files() -> Vec<Generated> {
    vec![
        Generated { path: "deploy/crd/crd.yaml", place: TextPlace::Whole, text: |built| from_agent(built, "crd") },
        Generated {
            path: "deploy/crd/egressservices.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "egress-services"),
        },
        Generated {
            path: "deploy/base/egressassignments.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "egress-assignments"),
        },
        Generated {
            path: "deploy/antrea/egresses.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "antrea-egresses"),
        },
        Generated {
            path: "deploy/antrea/externalippools.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "antrea-pools"),
        },
        Generated {
            path: "deploy/cilium/ciliumegressgatewaypolicies.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "cilium-policies"),
        },
        Generated {
            path: "deploy/cilium/egressgatewaypolicystatuses.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "cilium-statuses"),
        },
        Generated {
            path: "deploy/egress-router/controller/egressrouters.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "egress-routers"),
        },
        Generated {
            path: "deploy/base/egressnodes.yaml",
            place: TextPlace::Whole,
            text: |built| from_agent(built, "egress-nodes"),
        },
        Generated { path: "docs/datapath.md", place: TextPlace::Between("verdicts"), text: |_| Ok(verdict_table()) },
        Generated {
            path: "docs/metrics.md",
            place: TextPlace::Between("metrics"),
            text: |built| from_agent(built, "metrics"),
        },
        Generated {
            path: "docs/configuration.md",
            place: TextPlace::Between("configuration"),
            text: |built| from_agent(built, "configuration"),
        },
        Generated { path: "docs/images/throughput.svg", place: TextPlace::Whole, text: |_| bench::chart_of(RESULTS) },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("figures"),
            text: |_| bench::table_of(RESULTS),
        },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("machine"),
            text: |_| bench::machine_of(RESULTS),
        },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("cores"),
            text: |_| bench::cores_table_of(RESULTS),
        },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("churn"),
            text: |_| bench::churn_table_of(RESULTS),
        },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("programs"),
            text: |_| bench::programs_table_of(RESULTS),
        },
        Generated {
            path: "docs/performance.md",
            place: TextPlace::Between("load"),
            text: |_| bench::load_table_of(RESULTS),
        },
        Generated {
            path: "docs/troubleshooting.md",
            place: TextPlace::Between("reasons"),
            text: |built| from_agent(built, "reasons"),
        },
        Generated {
            path: "docs/api.md",
            place: TextPlace::Between("api"),
            text: |built| from_agent(built, "api-reference"),
        },
        Generated {
            path: "docs/limits.md",
            place: TextPlace::Between("maps"),
            text: |built| from_agent(built, "map-sizes"),
        },
        Generated {
            path: "docs/limits.md",
            place: TextPlace::Between("limits"),
            text: |built| from_agent(built, "limits"),
        },
        // What they are made of is written above.
        whole("deploy/monitoring/operator/prometheusrule.yaml", |_| chart::prometheus_rule()),
        whole("deploy/helm/egress-agent/templates/rbac.yaml", |_| chart::access()),
        whole("deploy/helm/egress-agent/templates/roles.yaml", |_| chart::roles()),
        whole("deploy/helm/egress-agent/templates/admission.yaml", |_| chart::admission()),
        whole("deploy/helm/egress-agent/templates/flowcontrol.yaml", |_| chart::flow_control()),
        whole("deploy/helm/egress-agent/templates/scc.yaml", |_| chart::security_context_constraints()),
        whole("deploy/helm/egress-agent/templates/podmonitor.yaml", |_| chart::pod_monitor()),
        whole("deploy/helm/egress-agent/templates/daemonset.yaml", |_| chart::agents()),
        whole("deploy/helm/egress-agent/templates/controller.yaml", |_| chart::controllers()),
        whole("deploy/helm/egress-agent/templates/cleanup.yaml", |_| chart::cleanup()),
        whole("deploy/helm/egress-agent/templates/egress-router-rbac.yaml", |_| chart::router_access()),
        whole("deploy/helm/egress-agent/templates/egress-router.yaml", |_| chart::router()),
        whole("deploy/helm/egress-agent/files/agent.conf", |_| chart::copied("base/agent.conf")),
        whole("deploy/helm/egress-agent/files/alerts.yaml", |_| chart::copied("monitoring/alerts.yaml")),
        whole("deploy/helm/egress-agent/files/egressnodes.yaml", |_| chart::copied("base/egressnodes.yaml")),
        whole("deploy/helm/egress-agent/files/egressassignments.yaml", |_| {
            chart::copied("base/egressassignments.yaml")
        }),
        whole("deploy/helm/egress-agent/files/egressips.yaml", |_| chart::copied("crd/crd.yaml")),
        whole("deploy/helm/egress-agent/files/egressservices.yaml", |_| chart::copied("crd/egressservices.yaml")),
        whole("deploy/helm/egress-agent/files/egresses.yaml", |_| chart::copied("antrea/egresses.yaml")),
        whole("deploy/helm/egress-agent/files/externalippools.yaml", |_| chart::copied("antrea/externalippools.yaml")),
        whole("deploy/helm/egress-agent/files/ciliumegressgatewaypolicies.yaml", |_| {
            chart::copied("cilium/ciliumegressgatewaypolicies.yaml")
        }),
        whole("deploy/helm/egress-agent/files/egressgatewaypolicystatuses.yaml", |_| {
            chart::copied("cilium/egressgatewaypolicystatuses.yaml")
        }),
        whole("deploy/helm/egress-agent/files/egressrouters.yaml", |_| {
            chart::copied("egress-router/controller/egressrouters.yaml")
        }),
    ]
}

fn whole(path: &'static str, text: fn(&Built) -> Result<String>) -> Generated {
    Generated { path, place: TextPlace::Whole, text }
}

/// Their paths in the clone.
pub(crate) fn generated_paths() -> Vec<&'static str> {
    files().into_iter().map(|file| file.path).collect()
}

/// What the agent prints for `egress-agent codegen WHAT`: it has the types, and xtask need not be built with them.
fn from_agent(built: &Built, what: &str) -> Result<String> {
    output(std::process::Command::new(&built.agent).args(["codegen", what]))
}

/// One row per verdict, in the order of their numbers, which are the indices of the map `counters`.
fn verdict_table() -> String {
    let mut table = String::from("| number | label | class | what happened to the packet |\n|---|---|---|---|\n");
    for verdict in Verdict::ALL {
        let class = match verdict.class() {
            Class::Pass => "pass",
            Class::Redirect => "redirect",
            Class::Answer => "answer",
            Class::Hold => "hold",
            Class::Drop => "drop",
        };
        let sentence = verdict.describe().trim();
        table += &format!("| {} | `{}` | {class} | {sentence} |\n", verdict.index(), verdict.label());
    }
    table
}

pub(crate) fn codegen(args: &CodegenArgs) -> Result<()> {
    let built = ensure_built(&BuildArgs::default(), &Progress::start())?;
    if args.check {
        let checked = check_generated(&built)?;
        let drifted: Vec<&str> = checked.iter().filter(|file| !file.fresh).map(|file| file.path).collect();
        if !drifted.is_empty() {
            bail!("not up to date: {}; run `cargo xtask codegen`", drifted.join(", "));
        }
        println!("{} generated files are up to date", checked.len());
        return Ok(());
    }
    let root = Paths::find()?.root;
    for file in files() {
        let path = root.join(file.path);
        let wanted = wanted(&file, &path, &built)?;
        if present(&path)? != wanted {
            write(&path, &wanted)?;
            println!("wrote {}", file.path);
        }
    }
    Ok(())
}

/// One generated file, compared with what would be written.
pub(crate) struct Checked {
    pub(crate) path: &'static str,
    pub(crate) fresh: bool,
}

pub(crate) fn check_generated(built: &Built) -> Result<Vec<Checked>> {
    let root = Paths::find()?.root;
    let check = |file: Generated| {
        let path = root.join(file.path);
        let fresh = present(&path)? == wanted(&file, &path, built)?;
        Ok(Checked { path: file.path, fresh })
    };
    files().into_iter().map(check).collect()
}

/// The file as it should be.
fn wanted(file: &Generated, path: &Path, built: &Built) -> Result<String> {
    let text = (file.text)(built).with_context(|| format!("generate {}", file.path))?;
    match file.place {
        TextPlace::Whole => Ok(text),
        TextPlace::Between(name) => {
            spliced(&present(path)?, name, &text).with_context(|| format!("{} has no markers for {name}", file.path))
        }
    }
}

/// An absent file is like an empty one.
fn present(path: &Path) -> Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        other => other.with_context(|| format!("read {}", path.display())),
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// The page with the text between its markers replaced.
fn spliced(page: &str, name: &str, text: &str) -> Option<String> {
    let first = format!("<!-- generated: {name} -->\n");
    let last = format!("<!-- end: {name} -->");
    let (before, rest) = page.split_once(&first)?;
    let (_, after) = rest.split_once(&last)?;
    Some(format!("{before}{first}{}\n{last}{after}", text.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_between_the_markers_and_nothing_else_changes() {
        let page = "# Page\n<!-- generated: table -->\nold\nrows\n<!-- end: table -->\nrest\n";
        let once = spliced(page, "table", "new\n").expect("markers");
        assert_eq!(once, "# Page\n<!-- generated: table -->\nnew\n<!-- end: table -->\nrest\n");
        assert_eq!(spliced(&once, "table", "new").as_deref(), Some(once.as_str()));
        assert_eq!(spliced(page, "other", "new"), None);
    }

    #[test]
    fn every_verdict_has_a_row() {
        let table = verdict_table();
        assert_eq!(table.lines().count(), 2 + Verdict::ALL.len());
        assert!(table.contains("| 42 | `no_gateway` | drop | "));
        // Four columns, so a sentence with a bar of its own would show.
        assert!(table.lines().all(|line| line.matches('|').count() == 5), "{table}");
    }

    /// An API server reads a bound as a number of 64 bits, and refuses every object with the field if it cannot. Whole numbers
    /// below 2^53 are exact however they are written.
    #[test]
    fn bounds_of_integers_are_whole_numbers() {
        fn check(node: &serde_json::Value, path: &str) -> usize {
            let mut found = 0;
            if node["type"] == "integer" {
                for bound in ["minimum", "maximum"].iter().filter_map(|word| node[word].as_f64()) {
                    assert!(bound.fract() == 0.0 && bound.abs() < 2_f64.powi(53), "{path}: {bound}");
                    found += 1;
                }
            }
            let below =
                node.as_object().into_iter().flatten().map(|(name, node)| check(node, &format!("{path}.{name}")));
            let items = node.as_array().into_iter().flatten().map(|node| check(node, path));
            found + below.chain(items).sum::<usize>()
        }
        let root = Paths::find().expect("the clone").root;
        let is_yaml = |path: &&str| path.ends_with(".yaml") && !path.contains("/templates/");
        let definitions = generated_paths().into_iter().filter(is_yaml);
        let bounds = definitions.map(|path| {
            let text = fs::read_to_string(root.join(path)).expect("a generated file");
            check(&serde_yaml::from_str(&text).expect("YAML"), path)
        });
        assert!(bounds.sum::<usize>() >= 4);
    }
}
