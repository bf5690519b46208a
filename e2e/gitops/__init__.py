"""How GitOps tools read objects: Argo CD by the health checks of manifests/gitops, in a Lua that is closed as Argo CD's
own is (argocd.py); Flux by its kstatus library (kstatus.py).
"""
