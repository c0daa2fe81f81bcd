//! Which files of the node a configuration may name. This program is root there, and who may write a network's configuration in
//! some namespace is not: such a path must lead neither to a file that it could change, nor to credentials that are not its own.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Where the runtime's environment, which is the node's, says that configurations are.
const VARIABLE: &str = "EGRESS_ROUTER_CONFIG_DIR";
const CONFIG_DIR: &str = "/etc/cni/net.d";
/// Where logs may be.
const LOG_DIRS: [&str; 2] = ["/var/log", "/tmp"];

/// A file in the folder of CNI's configurations, where an administrator of the node has put it.
///
/// # Errors
/// It is elsewhere, or is not there.
pub fn configuration(path: &Path) -> io::Result<PathBuf> {
    let folder = std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(CONFIG_DIR), PathBuf::from);
    let real = fs::canonicalize(path)?;
    match real.starts_with(fs::canonicalize(&folder)?) {
        true => Ok(real),
        false => Err(io::Error::other(format!("it is not in {}", folder.display()))),
    }
}

/// Opens a log file for further lines.
///
/// # Errors
/// It is not where logs may be, is a link, or cannot be opened.
pub fn log(path: &Path) -> io::Result<File> {
    let name = path.file_name().ok_or_else(|| io::Error::other("it names no file"))?;
    let folder = fs::canonicalize(path.parent().unwrap_or(Path::new("/")))?;
    if !LOG_DIRS.iter().any(|allowed| folder.starts_with(allowed)) {
        return Err(io::Error::other(format!("logs may be in {}", LOG_DIRS.join(" and "))));
    }
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o640).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(folder.join(name))?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_regular_files_where_logs_may_be() {
        let folder = std::env::temp_dir().join(format!("egress-router-log-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        assert!(log(&folder.join("log")).is_ok());
        for elsewhere in ["/etc/cron.d/x", "/tmp/../etc/x", "/", "log"] {
            assert!(log(Path::new(elsewhere)).is_err(), "{elsewhere}");
        }
        std::os::unix::fs::symlink("/etc/egress-router-test", folder.join("link")).expect("a link");
        assert!(log(&folder.join("link")).is_err() && !Path::new("/etc/egress-router-test").exists());
        std::os::unix::fs::symlink("/etc", folder.join("folder")).expect("a link");
        assert!(log(&folder.join("folder/egress-router-test")).is_err());
        fs::remove_dir_all(&folder).expect("it was there");
    }

    #[test]
    fn configurations_are_where_the_node_has_them() {
        for elsewhere in ["/etc/hostname", "/etc/cni/net.d/../../hostname"] {
            assert!(configuration(Path::new(elsewhere)).is_err(), "{elsewhere}");
        }
    }
}
