//! The databases of OVN and northd, which translates one into the other.

use std::path::{Path, PathBuf};

use anyhow::Result;
use egress_toolchain::ovn::OvnPrograms;
use egress_toolchain::run;

use super::super::netns;
use super::{Daemon, listens};

pub(super) struct Central {
    folder: PathBuf,
    /// Dropped in this order.
    _daemons: Vec<Daemon>,
}

impl Central {
    pub(super) fn start(programs: &OvnPrograms, prefix: &str, folder: &Path, logs: &Path) -> Result<Self> {
        let mut daemons = Vec::new();
        let mut start = |name: &str, program: &str, arguments: &[String]| -> Result<()> {
            let line = programs.line(program)?;
            let mut command = netns::marked(prefix, &line[0]);
            command.args(&line[1..]).args(arguments);
            command.args(common_arguments(folder, &logs.join(format!("{name}.log")), name));
            command.env("OVN_RUNDIR", folder).env("OVS_RUNDIR", folder);
            daemons.push(Daemon::start(name.to_owned(), command, None)?);
            Ok(())
        };
        for database in ["nb", "sb"] {
            let file = folder.join(format!("{database}.db"));
            let schema = programs.schema(&format!("ovn-{database}"));
            run(programs.command("ovsdb-tool")?.arg("create").arg(&file).arg(schema))?;
            let socket = folder.join(format!("{database}.sock"));
            let remote = format!("--remote=punix:{}", socket.display());
            start(&format!("ovsdb-{database}"), "ovsdb-server", &[file.display().to_string(), remote])?;
            listens(&socket)?;
        }
        let north = |name| format!("--ovn{name}-db=unix:{}", folder.join(format!("{name}.sock")).display());
        start("northd", "ovn-northd", &[north("nb"), north("sb")])?;
        daemons.reverse();
        Ok(Self { folder: folder.to_owned(), _daemons: daemons })
    }

    /// How `ovn-nbctl` reaches its database.
    pub(super) fn north(&self) -> String {
        format!("--db=unix:{}", self.folder.join("nb.sock").display())
    }
}

/// Of every daemon: where it keeps its files.
pub(super) fn common_arguments(folder: &Path, log: &Path, name: &str) -> Vec<String> {
    vec![
        format!("--pidfile={}", folder.join(format!("{name}.pid")).display()),
        format!("--unixctl={}", folder.join(format!("{name}.ctl")).display()),
        format!("--log-file={}", log.display()),
        "-vconsole:off".to_owned(),
        "-vsyslog:off".to_owned(),
    ]
}
