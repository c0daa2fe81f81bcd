//! What real nodes are made of, found before anything is started: Kubernetes' own programs in the folder that
//! `KUBEBUILDER_ASSETS` names, the distribution's packages, the agent's image, and an image for the pods.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{Image, Paths, helm, names_an_interpreter};

/// Of Kubernetes, in the assets' folder.
const COMPONENTS: [&str; 6] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"];
/// What the script of a pod may call.
const APPLETS: [&str; 4] = ["sh", "sleep", "ping", "nc"];
/// The image of the pods, and of their sandboxes.
pub(super) const BOX: &str = "localhost/box:1";

/// The folder with Kubernetes' programs, if a kubelet is among them: envtest's own folder has none.
pub fn assets() -> Option<PathBuf> {
    let folder = std::env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty()).map(PathBuf::from)?;
    folder.join("kubelet").is_file().then_some(folder)
}

/// Everything is here.
#[derive(Debug)]
pub(super) struct NodePrograms {
    pub(super) assets: PathBuf,
    pub(super) kubectl: PathBuf,
    pub(super) runc: PathBuf,
    /// The folder of CNI plugins.
    pub(super) plugins: PathBuf,
    /// In which nodes look for programs.
    pub(super) path: String,
    /// The agent's, in one file.
    pub(super) image: PathBuf,
    /// Without it the chart's test is skipped.
    pub(super) helm: Option<PathBuf>,
    busybox: PathBuf,
}

impl NodePrograms {
    pub(super) fn find(paths: &Paths) -> Result<Self> {
        let assets = assets().context("KUBEBUILDER_ASSETS names no folder with a kubelet")?;
        let missing: Vec<&str> = COMPONENTS.into_iter().filter(|name| !assets.join(name).is_file()).collect();
        ensure!(missing.is_empty(), "KUBEBUILDER_ASSETS is {} and has no {}", assets.display(), missing.join(", "));
        packages::ensure(Purpose::Nodes, false)?;
        let find = |program| packages::find(program).with_context(|| format!("{program} is missing"));
        let own = Some(assets.join("kubectl")).filter(|kubectl| kubectl.is_file());
        let kubectl = own.or_else(|| packages::find("kubectl"));
        let kubectl = kubectl.context("kubectl is missing: put it beside the kubelet, or install it")?;
        let image = Image::expected(paths).archive();
        ensure!(
            image.is_file(),
            "the agent has no image: run `cargo xtask image` (or `cargo xtask image --dev`) first"
        );
        let busybox = find("busybox")?;
        let is_static = !names_an_interpreter(&fs::read(&busybox)?)?;
        ensure!(is_static, "{} wants a dynamic linker: `apt-get install busybox-static`", busybox.display());
        let plugins = find("host-local")?.parent().context("no folder of plugins")?.to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(assets.clone()).chain(packages::unpacked());
        let path = std::env::join_paths(folders.chain(std::env::split_paths(&path)))?;
        let path = path.into_string().ok().context("PATH is no text")?;
        let (runc, helm) = (find("runc")?, helm::find(paths));
        Ok(Self { kubectl, runc, plugins, path, image, helm, busybox, assets })
    }

    /// Puts the images of a node into a folder, each as one file.
    pub(super) fn lay_out_images(&self, folder: &Path) -> Result<()> {
        let root = folder.join("root");
        fs::create_dir_all(root.join("bin"))?;
        fs::create_dir_all(root.join("tmp"))?;
        let busybox = root.join("bin/busybox");
        fs::copy(&self.busybox, &busybox)?;
        fs::set_permissions(&busybox, fs::Permissions::from_mode(0o755))?;
        APPLETS.iter().try_for_each(|applet| symlink("busybox", root.join("bin").join(applet)))?;
        let made = Image::at(folder.join("box"));
        made.assemble(&root, 0, &["--config.env=PATH=/bin", "--config.entrypoint=/bin/sleep", "--config.cmd=1000000"])?;
        let images = folder.join("images");
        fs::create_dir_all(&images)?;
        made.pack_into(&images.join("box.tar"), BOX)?;
        fs::copy(&self.image, images.join("egress-agent.tar")).context("copy the agent's image")?;
        fs::remove_dir_all(root)?;
        Ok(fs::remove_dir_all(folder.join("box"))?)
    }
}
