# What a node keeps while it is switched off: a file system in memory at /mnt, in a mount namespace that only this process keeps.
# It has the container runtime's and the kubelet's data, and what the node's programs write to /etc, /opt and /var.
#
# NODE is the node's name, STATE has what nodes/node.rs wrote for it, PLUGINS has CNI plugins.
set -eu
mount -t tmpfs -o mode=755 node /mnt
cd /mnt
mkdir state logs containerd sys settings
# The kubelet finds the file system of the images by its only mount.
mount -t tmpfs -o mode=755 containerd containerd
for folder in etc opt var; do mkdir -p "over/$folder" "work/$folder"; done
mkdir -p over/etc/cni/net.d over/opt/cni/bin
cp "$PLUGINS"/* over/opt/cni/bin/
cp "$STATE/$NODE.conflist" over/etc/cni/net.d/10-bridge.conflist
touch ready
exec sleep infinity
